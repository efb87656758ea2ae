#!/bin/sh
# After device-manager was installed or upgraded, by dpkg ("configure", and the version before) or rpm (1, or 2 for an
# upgrade).
set -e
units='device-manager.socket device-manager-leases.socket'
root=${DPKG_ROOT:-}
case "$1 ${2:-}" in
'configure ') manager=dpkg upgrade= ;;
configure\ *) manager=dpkg upgrade=yes ;;
'1 ') manager=rpm upgrade= ;;
[2-9]\ *) manager=rpm upgrade=yes ;;
*) exit 0 ;;
esac

if [ -z "$upgrade" ] && command -v systemctl >/dev/null; then
	# Presets of the host come before the package's own, which enables them.
	for unit in $units; do
		systemctl ${root:+--root="$root"} --quiet preset "$unit" || :
	done
fi
# Without a running systemd, as in a chroot or a container, the sockets are made at the next boot.
if [ -z "$root" ] && [ -d /run/systemd/system ]; then
	systemctl daemon-reload || :
	systemctl try-restart device-manager.service || : # pods and leases keep their devices
	# Packages of Debian start what is enabled; those of rpm leave that to the administrator.
	if [ $manager = dpkg ]; then
		for unit in $units; do
			! systemctl --quiet is-enabled "$unit" || systemctl start "$unit" || :
		done
	fi
fi
