#!/bin/sh
# Downloads the distribution's cloud kernel ($KS_FETCH_DIR), with the package lists of a fresh Debian
# tree rather than the host's. Run as a customize hook of mmdebstrap, variant custom.
set -eu
export APT_CONFIG="$MMDEBSTRAP_APT_CONFIG"
cd "$KS_FETCH_DIR"
image=$(apt-cache depends linux-image-cloud-amd64 \
    | sed -n 's/^ *Depends: \(linux-image-[0-9].*\)$/\1/p' | head -n 1)
test -n "$image"
apt-get download -qq -o APT::Sandbox::User=root "$image"
