#!/bin/sh
# Before gpu-cdi-plugin is removed, by dpkg ("remove") or rpm (0). An upgrade does nothing here.
set -e
case "$1" in
remove | 0) ;;
*) exit 0 ;;
esac
# In another root, where an image is made, no engine runs and no service.
[ -z "${DPKG_ROOT:-}" ] || exit 0

# of_daemonset FILE... reports whether files name the hook of a DaemonSet on the same host, and not the package's.
of_daemonset() {
	grep -qs '"/var/lib/gpu-cdi-plugin/bin/' "$@" && ! grep -qs '"/usr/libexec/gpu-cdi-plugin/' "$@"
}

# podman starts no container with a hook that does not exist.
record=/var/lib/gpu-cdi-plugin/hook-install.json
written=$(sed -n 's#^ *"\(/[^"]*\)": .*#\1#p' $record 2>/dev/null) || :
if [ -e $record ] && ! of_daemonset $record $written && ! /usr/bin/gpu-cdi-plugin hook uninstall >/dev/null; then
	echo "gpu-cdi-plugin stays installed: engines are configured to run its hook, as $record has it" >&2
	exit 1
fi
if [ -d /run/systemd/system ]; then
	systemctl stop gpu-cdi-await.service gpu-cdi-watch.service gpu-cdi-plugin.service 'gpu-cdi-mps*' 'device-manager*' || :
fi
# The specs name the hook too. Those of another kind are left, and all if the configuration has an error.
of_daemonset /etc/cdi/*.json /run/cdi/*.json || /usr/bin/gpu-cdi-plugin --log-level error cdi remove >/dev/null || :
specs=$(grep -ls '"/usr/libexec/gpu-cdi-plugin/prestart-hook"' /etc/cdi/*.json /run/cdi/*.json) || :
if [ "$specs" ]; then
	echo "gpu-cdi-plugin: these CDI specs name its hook, and no container with their devices starts without it. Remove" \
		"them:" $specs >&2
fi
