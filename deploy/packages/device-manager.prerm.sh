#!/bin/sh
# Before device-manager is removed, by dpkg ("remove") or rpm (0). An upgrade does nothing here.
set -e
case "$1" in
remove | 0) ;;
*) exit 0 ;;
esac
if [ -z "${DPKG_ROOT:-}" ] && [ -d /run/systemd/system ]; then
	watch=
	if systemctl --quiet is-active device-manager.service && systemctl --quiet is-enabled gpu-cdi-watch.service; then
		watch=yes # the service ran in its place
	fi 2>/dev/null
	systemctl stop device-manager.socket device-manager-leases.socket device-manager.service || :
	[ -z "$watch" ] || systemctl start gpu-cdi-watch.service || :
fi
