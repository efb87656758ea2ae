#!/bin/sh
# Unpacks Debian's packages into a directory: of a base system, or of NVIDIA's driver over a base system. No script of a
# package runs but those that make the alternatives of the driver. What was downloaded is kept in the user's cache
# directory, and used if it has the checksum of the suite's list. The mirror is this machine's.
# usage: root.sh base SUITE DIR PACKAGE...      the packages, what they depend on, and what each Debian has
#        root.sh driver SUITE DIR SOURCE BRANCH    the user space that the source package has of a driver's branch;
#                                                  prints the driver's version
# exit status: 69 if the suite cannot be had, 3 if the archive no longer has it or the packages; standard error says so
set -eu
export LC_ALL=C
what=$1 suite=$2 dir=$3
shift 3
cache=${XDG_CACHE_HOME:-$HOME/.cache}/gpu-cdi-plugin/debian
lists=$cache/$suite-all
mkdir -p "$cache/archives" "$lists/partial" "$dir"
exec 9>"$cache/lock"
flock 9

mirror=$(apt-get indextargets --format '$(REPO_URI)' | grep -v security | head -n 1)
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] ${mirror:-http://deb.debian.org/debian/} $suite" \
	"main contrib non-free $([ "$suite" = bullseye ] || echo non-free-firmware)" >"$cache/$suite-all.list"
cat >"$cache/$suite-all.conf" <<END
Dir::Etc::sourcelist "$cache/$suite-all.list";
Dir::Etc::sourceparts "/dev/null";
Dir::State::lists "$lists";
Dir::State::status "/dev/null";
Dir::Cache::pkgcache "";
Dir::Cache::srcpkgcache "";
Acquire::Languages "none";
Acquire::http::Timeout "30";
Acquire::Retries "2";
Acquire::IndexTargets::deb::DEP-11::DefaultEnabled "false";
APT::Update::Error-Mode "any";
APT::Install-Recommends "false";
APT::Sandbox::User "root";
END
export APT_CONFIG="$cache/$suite-all.conf"
# lacking PROBLEM STATUS ends with the first error of apt.
lacking() {
	echo "$suite $1: $(grep -m 1 '^E:' "$dir.log")" >&2
	exit "$2"
}
apt-get -q update >"$dir.log" 2>&1 || {
	! grep -q 'does not have a Release file' "$dir.log" || lacking 'is gone' 3
	lacking 'cannot be had' 69
}

# names prints the packages as NAME=VERSION.
names() {
	if [ "$what" = base ]; then
		# Each line is like "Inst runc (1.1.15+ds1-2+b4 Debian:13/stable [amd64])". What only compilers of shaders, and
		# scripts of packages need is left out, and so is the suite's own driver.
		apt-get -q install --simulate '?essential' "$@" 2>"$dir.log" |
			sed -n -E '/^Inst (perl|libllvm|libz3|libnvidia-cfg|nvidia-(alternative|legacy-check|installer-cleanup) )/d
				s/^Inst ([^ ]*) \(([^ ]*) .*/\1=\2/p'
	else
		apt-cache dumpavail | awk -v source="$1" -v branch="$2" '
			/^Package: / { name = $2; from = $2 }
			/^Source: / { from = $2 }
			/^Version: / { has = $2 }
			/^$/ && from == source && index(has, branch ".") == 1 &&
				name !~ /kernel-(dkms|source)|legacy-check|nvidia-detect/ { print name "=" has }'
	fi
}
names "$@" >"$dir.names"
[ -s "$dir.names" ] || {
	[ "$what" = driver ] || lacking 'lacks packages' 3
	echo "$suite has no driver $2 of $1" >&2
	exit 3
}
# Each line is like "'URI' runc_1.1.15+ds1-2+b4_amd64.deb SIZE SHA256:SUM". apt takes a file of the right size for whole.
# shellcheck disable=SC2046 # a list of packages
apt-get -q download --print-uris $(cat "$dir.names") 2>"$dir.log" |
	sed -n "s/^'.*' \([^ ]*\) .* SHA256:\(.*\)/\2  \1/p" >"$dir.sums"
(
	cd "$cache/archives"
	sha256sum --check --quiet "$dir.sums" 2>/dev/null | sed 's/: FAILED.*//' | xargs -r rm -f
	# shellcheck disable=SC2046 # a list of packages
	apt-get -q download $(cat "$dir.names") && sha256sum --check --quiet "$dir.sums"
) >"$dir.log" 2>&1 || lacking 'cannot be had' 69

if [ "$what" = base ]; then # the links of /bin and others come before what is in them
	for name in bin lib lib64 sbin; do
		mkdir -p "$dir/usr/$name"
		ln -s usr/$name "$dir/$name"
	done
fi
while read -r _ name; do
	file=$cache/archives/$name
	dpkg-deb --fsys-tarfile "$file" | tar -x --keep-directory-symlink -C "$dir"
	case $name in
	nvidia-*alternative_* | glx-alternative-nvidia_*)
		# Debian's 525 is disabled, since NVIDIA has ended it.
		# shellcheck disable=SC2016 # a variable of the script
		dpkg-deb --info "$file" postinst | sed 's/"DISABLED"/"$slaves"/' >"$dir/var/$name"
		;;
	esac
done <"$dir.sums"
if [ "$what" = driver ]; then
	# The scripts register the links of what is installed. They activate each other by triggers, of which dpkg knows
	# nothing here.
	mkdir -p "$dir/run/alternatives"
	ln -sf /bin/true "$dir/run/alternatives/dpkg-trigger"
	ln -sf /bin/true "$dir/run/alternatives/dpkg-maintscript-helper"
	for script in "$dir"/var/nvidia-*alternative_* "$dir"/var/glx-alternative-nvidia_*; do
		chroot "$dir" env PATH=/run/alternatives:/usr/sbin:/usr/bin /bin/sh "/var/${script##*/}" triggered \
			register-glx-alternative-nvidia--pong >>"$dir.log" 2>&1
		rm "$script"
	done
	rm -r "$dir/run/alternatives"
	sed -n '/libnvidia.*-\{0,1\}ml1=/ s/.*=\(.*\)-.*/\1/p' "$dir.names"
fi
chroot "$dir" /sbin/ldconfig
