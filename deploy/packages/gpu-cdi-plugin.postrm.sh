#!/bin/sh
# After gpu-cdi-plugin was removed, by dpkg ("remove", then perhaps "purge") or rpm (0). Until a purge dpkg keeps what
# the administrator has set, such as which units are enabled. rpm has no purge, and keeps state and configuration.
set -e
root=${DPKG_ROOT:-}
case "$1" in
purge)
	rm -f "$root/etc/systemd/system/"*".wants/gpu-cdi-"*.service
	if [ -e "$root/var/lib/gpu-cdi-plugin/bin" ]; then
		# The launcher of the container image has put its programs there, and specs name its hook.
		echo "gpu-cdi-plugin: /etc/gpu-cdi-plugin, /var/lib/gpu-cdi-plugin and /run/gpu-cdi-plugin stay for the DaemonSet" \
			'that uses them' >&2
	else
		# The shared memory of MPS stays mounted when its unit ends, for the containers that have it.
		if [ -z "$root" ] && [ -r /proc/self/mountinfo ]; then
			sed -n 's#^[^ ]* [^ ]* [^ ]* [^ ]* \(/run/gpu-cdi-plugin/[^ ]*\) .*#\1#p' /proc/self/mountinfo | sort -r |
				while read -r point; do umount --lazy "$point"; done
		fi
		for dir in etc/gpu-cdi-plugin var/lib/gpu-cdi-plugin run/gpu-cdi-plugin; do
			rm -rf --one-file-system "$root/$dir" || mountpoint -q "$root/$dir"
		done
	fi
	;;
0) rm -f /etc/systemd/system/*.wants/gpu-cdi-*.service ;;
remove) ;;
*) exit 0 ;;
esac
if [ -z "$root" ] && [ -d /run/systemd/system ]; then
	systemctl daemon-reload || :
	systemctl reset-failed 'gpu-cdi-*' || :
fi
