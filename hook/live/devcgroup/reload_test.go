package devcgroup

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/test/lib/engine"
	"gpu-cdi-plugin/test/lib/image"
	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/testenv"
)

// boot makes systemd the first process of a machine of its own: a copy of this one's root that ends with it. Its
// arguments are the test's directory, the arrangement of cgroups, the path of systemd, then the directories of a cgroup
// in each tree, which become the machine's root cgroups.
const boot = `set -e
dir=$1 cgroup=$2 systemd=$3
shift 3
for tree; do
	if [ -e "$tree/cpuset.cpus" ]; then
		cat "$tree/../cpuset.cpus" >"$tree/cpuset.cpus"
		cat "$tree/../cpuset.mems" >"$tree/cpuset.mems"
	fi
	echo $$ >"$tree/cgroup.procs"
done
exec unshare --mount --propagation private --pid --fork --kill-child --cgroup --uts --ipc sh -ec '
dir=$1 cgroup=$2 systemd=$3
mkdir "$dir/layer" "$dir/root"
mount -t tmpfs tmpfs "$dir/layer"
mkdir "$dir/layer/upper" "$dir/layer/work"
mount -t overlay -o "lowerdir=/,upperdir=$dir/layer/upper,workdir=$dir/layer/work" overlay "$dir/root"
cd "$dir/root"
mount -t proc proc proc
mount --rbind /sys sys
mount --rbind /dev dev
mount --rbind /tmp tmp
mount -t tmpfs tmpfs run
if [ "$cgroup" = v2 ]; then
	mount -t cgroup2 cgroup2 sys/fs/cgroup
else
	mount -t tmpfs tmpfs sys/fs/cgroup
	for tree in /sys/fs/cgroup/*; do
		if [ -L "$tree" ]; then continue; fi
		mkdir ".$tree"
		case $tree in
		*/systemd) mount -t cgroup -o none,name=systemd cgroup ".$tree" ;;
		*/unified) mount -t cgroup2 cgroup2 ".$tree" ;;
		*) mount -t cgroup -o "${tree##*/}" cgroup ".$tree" ;;
		esac
	done
fi
cp "$dir/test.target" "$dir/test.service" etc/systemd/system/
pivot_root . mnt
umount -l mnt
exec chroot . env -i container=test PATH="$PATH" "$systemd" --system --unit=test.target --log-target=null
' sh "$dir" "$cgroup" "$systemd"`

// reload is the service of that machine: it runs a container, has the container open the devices, reloads systemd's
// units, and has them opened again.
const reload = `cd "$1"
mkdir -p /etc/cdi /etc/gpu-cdi-plugin
cp spec.json /etc/cdi
cp hook.yaml /etc/gpu-cdi-plugin
mkfifo in out
exec 3<>in 4<>out
"$2" --systemd-cgroup --root /run/containers run --bundle "$3" gpu <in >out 2>error &
try() {
	echo >&3
	read -r -t 20 answer <&4
	echo "$1: $answer"
}
try started
systemctl daemon-reload
try reloaded
systemctl show -p DevicePolicy,DeviceAllow runc-gpu.scope | grep -e Policy -e 195
"$2" --root /run/containers kill gpu KILL
wait
cat error
systemctl exit --force --force`

// TestDaemonReload guards against the loss of a device at systemctl daemon-reload, on a real systemd. The hook is the
// released one.
func TestDaemonReload(t *testing.T) {
	testenv.Root(t)
	hook := filepath.Join(t.TempDir(), "prestart-hook")
	proc.Must(t, 0, proc.Cmd{
		Args: []string{"go", "build", "-trimpath", "-ldflags=-s -w", "-o", hook, "gpu-cdi-plugin/cmd/prestart-hook"},
		Env:  append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS="),
	})
	const start = "gpu No such device or address, other "
	for name, c := range map[string]struct {
		all  bool // the container may use all devices
		want []string
	}{
		"a container with a list": {false, []string{
			"started: " + start + denied, "reloaded: " + start + denied,
			"DevicePolicy=strict", "DeviceAllow=/dev/char/195:7 rw",
		}},
		"a container that may use all devices": {true, []string{
			"started: " + start + admitted, "reloaded: " + start + admitted, "DevicePolicy=auto",
		}},
	} {
		for _, cgroup := range []string{"v1", "v2"} {
			t.Run(name+" "+cgroup, func(t *testing.T) {
				t.Parallel()
				hierarchy(t, cgroup == "v2")
				got := runMachine(t, cgroup, reloadBundle(t, hook, c.all))
				if diff := cmp.Diff(c.want, got); diff != "" {
					t.Errorf("-want +got:\n%s", diff)
				}
			})
		}
	}
}

// reloadBundle makes a container that opens its devices for each line of its standard input. The hook gives it one of
// them.
func reloadBundle(t *testing.T, hook string, all bool) *image.Bundle {
	t.Helper()
	e := &engine.Bare{Runtime: "runc", Cgroup: engine.V1, Images: images}
	bundle := e.Bundle(t, images.Copy(t, image.Static), engine.Container{
		Mknod: true, Annotations: map[string]string{"cdi.k8s.io/gpu": "test.com/gpu=7"}, Args: []string{"sh", "-c", `
mknod /other c 195 8
try() { echo "$( (: <>"$1") 2>&1)"; }
while read -r line; do
	gpu=$(try /dev/gpu) other=$(try /other)
	echo "gpu ${gpu##*: }, other ${other##*: }"
done`},
	})
	err := bundle.Edit(func(s *specs.Spec) error {
		s.Hooks = &specs.Hooks{
			CreateRuntime: []specs.Hook{{Path: hook, Args: []string{"prestart-hook", "create-runtime"}}},
		}
		s.Linux.CgroupsPath = "system.slice:runc:gpu"
		if all {
			s.Linux.Resources.Devices = []specs.LinuxDeviceCgroup{{Allow: true, Access: "rwm"}}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return bundle
}

// runMachine boots a machine that runs the container, and returns what its service prints.
func runMachine(t *testing.T, cgroup string, bundle *image.Bundle) []string {
	t.Helper()
	systemd := testenv.Command(t, "/lib/systemd/systemd")
	for _, name := range []string{"unshare", "systemctl", "bash"} {
		testenv.Command(t, name)
	}
	dir, root := t.TempDir(), fmt.Sprintf("/devcgroup-test-%d-%d", os.Getpid(), cgroups.Add(1))
	output := filepath.Join(dir, "printed")
	if err := unix.Mknod(filepath.Join(dir, "gpu"), unix.S_IFCHR|0o666, int(unix.Mkdev(195, 7))); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, "spec.json"), fmt.Sprintf(`{
"cdiVersion": "0.6.0", "kind": "test.com/gpu", "devices": [{"name": "7", "containerEdits": {
"deviceNodes": [{"path": "/dev/gpu", "hostPath": "%s/gpu", "permissions": "rw"}]}}]}`, dir))
	write(t, filepath.Join(dir, "hook.yaml"), "kinds: [test.com/gpu]\n")
	write(t, filepath.Join(dir, "service.sh"), reload)
	write(t, filepath.Join(dir, "test.target"), "[Unit]\nDefaultDependencies=no\nWants=test.service\n")
	command := strings.Join([]string{"bash", dir + "/service.sh", dir, bundle.Runtime, bundle.Dir}, " ")
	write(t, filepath.Join(dir, "test.service"), "[Unit]\nDefaultDependencies=no\n"+
		"[Service]\nType=exec\nStandardOutput=file:"+output+"\nExecStart="+command+"\n")
	if err := engine.MakeCgroups(root); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		testenv.Eventually(t, "the cgroups can be removed", func() bool { return engine.RemoveCgroups(root) == nil })
	})
	trees, err := filepath.Glob("/sys/fs/cgroup/*" + root)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat("/sys/fs/cgroup" + root); err == nil {
		trees = []string{"/sys/fs/cgroup" + root}
	}
	res, err := proc.Run(t.Context(), proc.Cmd{
		Args: slices.Concat([]string{"sh", "-c", boot, "sh", dir, cgroup, systemd}, trees),
	})
	if err != nil {
		t.Fatal(err)
	}
	printed, err := os.ReadFile(output)
	if err != nil {
		t.Fatalf("%v: %v", err, res)
	}
	return strings.Split(strings.TrimSpace(string(printed)), "\n")
}
