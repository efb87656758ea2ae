#!/bin/sh
# Unpacks packages of a Debian suite, and what they depend on, into a directory. No script of a package runs. What was
# downloaded is kept in the user's cache directory, where apt compares it with the checksums of the suite. The mirror is
# this machine's.
# usage: root.sh SUITE DIR PACKAGE...   DIR/versions gets the names and versions of the packages
# exit status: 69 if the suite cannot be had, 3 if it lacks a package; standard error says so
set -eu
suite=$1 dir=$2
shift 2
cache=${XDG_CACHE_HOME:-$HOME/.cache}/gpu-cdi-plugin/debian
mkdir -p "$cache/archives/partial" "$cache/$suite/partial" "$dir"
exec 9>"$cache/lock"
flock 9

mirror=$(apt-get indextargets --format '$(REPO_URI)' | grep -v security | head -n 1)
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] ${mirror:-http://deb.debian.org/debian/} $suite main" \
	>"$cache/$suite.list"
apt() {
	apt-get -q -o Dir::Etc::sourcelist="$cache/$suite.list" -o Dir::Etc::sourceparts=/dev/null \
		-o Dir::State::lists="$cache/$suite" -o Dir::State::status=/dev/null -o Dir::Cache::archives="$cache/archives" \
		-o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache= -o Acquire::Languages=none -o Acquire::http::Timeout=30 \
		-o Acquire::Retries=2 -o APT::Update::Error-Mode=any -o APT::Install-Recommends=false \
		-o APT::Keep-Downloaded-Packages=true -o APT::Sandbox::User=root "$@"
}
apt update >"$dir.log" 2>&1 || {
	echo "$suite cannot be had: $(grep -m 1 '^E:' "$dir.log")" >&2
	exit 69
}
# Each line is like "Inst runc (1.1.15+ds1-2+b4 Debian:13/stable [amd64])".
apt install --simulate '?essential' mount "$@" >"$dir.log" 2>&1 || {
	echo "$suite: $(grep -m 1 '^E:' "$dir.log")" >&2
	exit 3
}
sed -n 's/^Inst \([^ ]*\) (\([^ ]*\) [^[]*\[\([^]]*\)\].*/\1 \2 \3/p' "$dir.log" >"$dir/versions"
apt install --yes --download-only '?essential' mount "$@" >"$dir.log" 2>&1 || {
	echo "$suite cannot be had: $(grep -m 1 '^E:' "$dir.log")" >&2
	exit 69
}
exec 9>&-
# The links of /bin, /lib and others come first.
{
	grep '^base-files ' "$dir/versions"
	grep -v '^base-files ' "$dir/versions"
} | sed 's/:/%3a/; s/ /_/g; s/$/.deb/' | while read -r file; do
	dpkg-deb --fsys-tarfile "$cache/archives/$file" | tar -x --keep-directory-symlink -C "$dir"
done
# What the packages' scripts, or an installer, make.
rm -rf "$dir/var/run"
ln -s /run "$dir/var/run"
: >"$dir/etc/resolv.conf"
: >"$dir/etc/localtime"
echo '127.0.0.1 localhost' >"$dir/etc/hosts"
echo 'root:x:0:0:root:/root:/bin/sh
nobody:x:65534:65534:nobody:/:/usr/sbin/nologin' >"$dir/etc/passwd"
echo 'root:x:0:
nogroup:x:65534:' >"$dir/etc/group"
