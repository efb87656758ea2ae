#!/bin/sh
# After device-manager was removed, by dpkg ("remove", then perhaps "purge") or rpm (0). Until a purge dpkg keeps what the
# administrator has set. rpm has no purge, and keeps state and configuration.
set -e
root=${DPKG_ROOT:-}
links=$root/etc/systemd/system/sockets.target.wants
case "$1" in
purge)
	rm -f "$links"/device-manager*.socket
	rm -rf --one-file-system "$root/etc/device-manager" "$root/var/lib/device-manager" "$root/run/device-manager"
	;;
0) rm -f "$links"/device-manager*.socket ;;
remove) ;;
*) exit 0 ;;
esac
if [ -z "$root" ] && [ -d /run/systemd/system ]; then
	systemctl daemon-reload || :
	systemctl reset-failed 'device-manager*' || :
fi
