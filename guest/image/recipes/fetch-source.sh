#!/bin/sh
# Downloads the distribution's kernel source ($KS_FETCH_DIR); a customize hook like fetch-kernel.sh.
set -eu
export APT_CONFIG="$MMDEBSTRAP_APT_CONFIG"
cd "$KS_FETCH_DIR"
apt-get download -qq -o APT::Sandbox::User=root linux-source-6.1
