#!/bin/sh
# After gpu-cdi-plugin was removed, by dpkg ("remove", then perhaps "purge") or rpm (0). Until a purge dpkg keeps what
# the administrator has set, such as which units are enabled. rpm has no purge, and keeps state and configuration.
set -e
root=${DPKG_ROOT:-}
case "$1" in
purge)
	rm -rf "$root/etc/gpu-cdi-plugin" "$root/var/lib/gpu-cdi-plugin" "$root/run/gpu-cdi-plugin"
	rm -f "$root/etc/systemd/system/"*".wants/gpu-cdi-"*.service
	;;
0) rm -f /etc/systemd/system/*.wants/gpu-cdi-*.service ;;
remove) ;;
*) exit 0 ;;
esac
if [ -z "$root" ] && [ -d /run/systemd/system ]; then
	systemctl daemon-reload || :
	systemctl reset-failed 'gpu-cdi-*' || :
fi
