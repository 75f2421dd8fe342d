#!/bin/sh
# Turns a fresh Debian tree ($1) into the session's root disk: the user, locales, sudo, and no trace of
# the machine that built it. Run as a customize hook of mmdebstrap.
set -eu
root=$1

printf 'en_US.UTF-8 UTF-8\n' > "$root/etc/locale.gen"
chroot "$root" locale-gen > /dev/null
# 17 MB that only generating further locales needs (apt-get install --reinstall locales brings it back).
rm -rf "$root/usr/share/i18n"
printf 'LANG=C.UTF-8\n' > "$root/etc/default/locale"

chroot "$root" groupadd --gid 1000 agent
chroot "$root" useradd --uid 1000 --gid 1000 --create-home --shell /bin/bash agent
install -d -o 1000 -g 1000 -m 0755 "$root/workspace"
printf 'agent ALL=(ALL:ALL) NOPASSWD: ALL\n' > "$root/etc/sudoers.d/agent"
chmod 0440 "$root/etc/sudoers.d/agent"

printf 'keepstate\n' > "$root/etc/hostname"
printf '127.0.0.1 localhost\n127.0.1.1 keepstate\n::1 localhost ip6-localhost\n' > "$root/etc/hosts"
# There is no network card: names are resolved by the session's proxy. A refusal is quicker than a timeout.
rm -f "$root/etc/resolv.conf"
printf 'nameserver 127.0.0.1\noptions attempts:1 timeout:1\n' > "$root/etc/resolv.conf"
printf '/dev/vda / ext4 rw,relatime 0 0\n' > "$root/etc/fstab"
printf 'KeepState guest: durable session, user agent, work in /workspace\n' > "$root/etc/motd"

# One id for each session: ks-guest writes it in the restore hook.
: > "$root/etc/machine-id"
rm -rf "$root/var/lib/dbus/machine-id"
rm -f "$root"/etc/ssh/ssh_host_*

dpkg-query --admindir="$root/var/lib/dpkg" -W -f '${Package} ${Version} ${Architecture}\n' \
    | LC_ALL=C sort > "$KS_PACKAGES"

rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/var/log/* "$root"/tmp/* "$root"/run/*
rm -rf "$root"/var/cache/debconf/*-old "$root"/var/lib/dpkg/*-old "$root"/var/cache/ldconfig
mkdir -p "$root/var/lib/apt/lists/partial" "$root/var/cache/apt/archives/partial"
rm -f "$root"/etc/passwd- "$root"/etc/group- "$root"/etc/shadow- "$root"/etc/gshadow-
