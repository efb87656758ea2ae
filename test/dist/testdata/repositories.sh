# A host that knows no repository but the published one, and installs from it by the commands of README.md.
fail() {
	echo "FAIL: $*"
	exit 1
}
check() { "$@" || fail "$*"; }
refuse() { ! "$@" || fail "$* succeeds"; }
set -a
. /srv/address
HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
set +a
set -x
check cd /srv
chmod 1777 /tmp # apt downloads as a user of its own
rm -rf /etc/apt/sources.list /etc/apt/sources.list.d /etc/yum.repos.d /etc/apt/keyrings /root/.rpmdb /root/.gnupg \
	/var/lib/containers
mkdir -p /etc/apt/sources.list.d /etc/yum.repos.d /etc/apt/keyrings
cat ca.pem >>/etc/ssl/certs/ca-certificates.crt
echo 'APT::Get::Assume-Yes "true";' >/etc/apt/apt.conf.d/zz-test
echo assumeyes=1 >>/etc/dnf/dnf.conf
printf '[storage]\ndriver = "vfs"\ngraphroot = "/var/lib/containers/storage"\nrunroot = "/run/containers"\n' \
	>/etc/containers/storage.conf # there is no overlay over the one that this root is

check sh -ex apt.sh
check gpu-cdi-plugin --version | grep -F "$VERSION"
check apt install device-manager
check gpu-run --help >/dev/null
# What another key has signed is not taken.
echo 'no key' >/etc/apt/keyrings/gpu-cdi-plugin.asc
refuse apt-get -o APT::Update::Error-Mode=any update
check apt purge gpu-cdi-plugin device-manager

check rpm -i --justdb base-*.rpm
check sh -ex dnf.sh
check rpm -V gpu-cdi-plugin
check gpu-cdi-plugin --version | grep -F "$VERSION"
check dnf install device-manager
check gpu-run --help >/dev/null
check dnf remove gpu-cdi-plugin device-manager
# dnf has imported the key: the packages are signed too, not only their index.
check curl -fsSLO "$URL/releases/$VERSION/gpu-cdi-plugin-$VERSION-1.x86_64.rpm"
check rpmkeys --define '_pkgverify_level signature' --checksig gpu-cdi-plugin-*.rpm

check sh -ex podman.sh
check podman image inspect --format '{{.Config.Entrypoint}}' "$REGISTRY/gpu-cdi-plugin:$VERSION"
check sh -ex check.sh
echo PASS >/media/log
