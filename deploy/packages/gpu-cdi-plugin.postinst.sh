#!/bin/sh
# After gpu-cdi-plugin was installed or upgraded, by dpkg ("configure", and the version before) or rpm (1, or 2 for an
# upgrade).
set -e
units='gpu-cdi-watch.service gpu-cdi-plugin.service'
root=${DPKG_ROOT:-}
case "$1 ${2:-}" in
'configure ') manager=dpkg upgrade= ;;
configure\ *) manager=dpkg upgrade=yes ;;
'1 ') manager=rpm upgrade= ;;
[2-9]\ *) manager=rpm upgrade=yes ;;
*) exit 0 ;;
esac

if [ -z "$root" ] && command -v systemd-tmpfiles >/dev/null; then
	systemd-tmpfiles --create gpu-cdi-plugin.conf || :
fi
if [ -z "$upgrade" ] && command -v systemctl >/dev/null; then
	# Presets of the host come before the package's own, which enables them.
	for unit in $units; do
		systemctl ${root:+--root="$root"} --quiet preset "$unit" || :
	done
fi
# Without a running systemd, as in a chroot or a container, the units start at the next boot. A condition of each unit
# decides which of the two runs.
if [ -z "$root" ] && [ -d /run/systemd/system ]; then
	systemctl daemon-reload || :
	restart=$units
	if systemctl --quiet is-active device-manager.service; then
		# It runs this program, in the place of both units.
		systemctl restart device-manager.service || :
		restart=
	elif [ $manager = dpkg ]; then
		for unit in device-manager.socket device-manager-leases.socket; do # they wait for this program
			! systemctl --quiet is-enabled $unit 2>/dev/null || systemctl start $unit || :
		done
	fi
	for unit in $restart; do
		# As long as the first one cannot start, the path unit and so the other one wait for it.
		wait=
		[ "$unit" = gpu-cdi-watch.service ] || wait=--no-block
		# Packages of Debian start what is enabled; those of rpm leave that to the administrator.
		if [ $manager = dpkg ] && systemctl --quiet is-enabled "$unit"; then
			systemctl $wait restart "$unit" || :
		else
			systemctl $wait try-restart "$unit" || :
		fi
	done
fi

# Since version 1.20 of NVIDIA's toolkit a udev rule starts the service at each load of the driver, also if it is
# disabled: only a masked one stays away. systemctl does not mask units in /etc/systemd/system, where earlier versions
# have them, without the rule.
refresh= stop=
for unit in nvidia-cdi-refresh.path nvidia-cdi-refresh.service; do
	for dir in /etc/systemd/system /usr/lib/systemd/system /lib/systemd/system; do
		file=$root$dir/$unit
		[ -e "$file" ] || [ -L "$file" ] || continue
		if [ "$(readlink "$file")" = /dev/null ]; then
			break
		elif [ $dir != /etc/systemd/system ]; then
			refresh="$refresh $unit"
			stop="${stop}systemctl mask --now $unit; "
		elif ls "$root"/etc/systemd/system/*.wants/$unit >/dev/null 2>&1; then
			refresh="$refresh $unit"
			stop="${stop}systemctl disable --now $unit; "
		fi
		break
	done
done
specs=
for spec in /etc/cdi/nvidia.yaml /run/cdi/nvidia.yaml; do
	[ ! -e "$root$spec" ] || specs="$specs $spec"
done
if [ "$refresh$specs" ]; then
	cat >&2 <<-END
		gpu-cdi-plugin: NVIDIA's CDI refresh is here too:$refresh$specs
		Engines refuse a device that two specs define. Choose one of the two:
		- this package: ${stop}rm -f /etc/cdi/nvidia.yaml /run/cdi/nvidia.yaml
		- NVIDIA's: systemctl disable --now $units; gpu-cdi-plugin cdi remove
	END
fi
