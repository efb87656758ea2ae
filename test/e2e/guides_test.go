package e2e

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/sim/simtest"
	"gpu-cdi-plugin/test/lib/engine"
	"gpu-cdi-plugin/test/lib/guide"
	"gpu-cdi-plugin/test/lib/image"
	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/suite"
	"gpu-cdi-plugin/test/lib/testenv"
)

// userCommands is how the commands of a document are run here. All of README.md are run, and the first block of others.
type userCommands struct {
	// reference means that the document has nothing to copy.
	reference bool
	// elsewhere is what runs the block, or why it cannot be run.
	elsewhere string
	machine   string // workstation by default
	// before is what is there before the commands, in shell.
	before string
	// instead has commands that need a registry, systemd, an editor or real hardware, and what is run in their place.
	instead map[string]string
	// status is the exit status, and want what the output has.
	status int
	want   []string
	// engine runs the commands if podman and runc do not.
	engine func(t *testing.T, n *sim.Node, script string) proc.Result
}

const (
	isListed = "GPU 0: NVIDIA "
	// awaiting waits until a command prints a text.
	awaiting = `
await() {
	for try in $(seq 300); do
		if "$@" 2>&1 | grep -q "$expect"; then return; fi
		kill -0 $! || break # the service that was started last
		sleep 0.1
	done
	cat /run/*.log >&2
	exit 99
}
`
	// kubelet starts a device manager and the plugin, and waits for the devices.
	kubelet = awaiting + `
device-manager serve >/run/manager.log 2>&1 &
expect=kubelet.sock await find /var/lib/kubelet/device-plugins/kubelet.sock
gpu-cdi-plugin serve >/run/serve.log 2>&1 & serve=$!
expect=Healthy await device-manager node --devices
`
	inCluster = "test/cluster runs it"
)

var documents = map[string]userCommands{
	"README.md": {
		machine: "dgx-h100",
		before: `
mkdir -p bundle/rootfs
podman export $(podman create ubuntu) | tar -x -C bundle/rootfs
runc spec --bundle bundle
sed -i 's/"terminal": true/"terminal": false/; s/"sh"/"nvidia-smi", "-L"/' bundle/config.json
`,
		instead: map[string]string{
			"apt install ./dist/gpu-cdi-plugin_*_amd64.deb": "", // TestSlowThePackageUnderSystemd in test/dist
			"helm install gpu-cdi-plugin dist/gpu-cdi-plugin-*.tgz -n kube-system " +
				"--set image.repository=REGISTRY/gpu-cdi-plugin": "", // the cluster's test
			"kubectl apply -f docs/gpu-pod.yaml": "", // the same
		},
		want: []string{isListed, " 0 failed"},
	},
	"docs/README.md":              {reference: true},
	"docs/allocator.md":           {reference: true},
	"docs/conformance.md":         {reference: true},
	"docs/engines.md":             {reference: true},
	"docs/hardware.md":            {reference: true},
	"docs/manager-differences.md": {reference: true},
	"docs/performance.md":         {reference: true},

	"docs/install.md":   {elsewhere: "TestSlowThePackageUnderSystemd in test/dist"},
	"docs/releasing.md": {elsewhere: "TestSlowTheReleaseIsPublished in test/dist"},
	"docs/podman.md":    {want: []string{"INDEX ", isListed}},
	"docs/docker.md":    {engine: behindDocker, want: []string{isListed}},
	"docs/cri-o.md": {
		engine: behindCRIO,
		// The check in the container finds the device nodes, which have no driver.
		status: 4, want: []string{"crictl: /dev/nvidia-", "in the container: no driver serves it"},
	},
	"docs/containerd.md": {
		engine:  behindContainerd,
		instead: map[string]string{"ctr image pull docker.io/library/ubuntu:24.04": "ctr image import $image"},
		want:    []string{isListed},
	},
	"docs/runc.md": {machine: "dgx-h100", want: []string{isListed, "\nGPU 1: NVIDIA "}},
	"docs/annotations.md": {
		// The engine's files are those of this machine, and not those of the simulated one.
		before: "unset GPU_CDI_ROOT", want: []string{"50-gpu-cdi-plugin.conf", isListed},
	},
	"docs/dra.md":        {elsewhere: inCluster},
	"docs/kubernetes.md": {elsewhere: inCluster},
	"docs/migrating.md":  {elsewhere: inCluster},
	"docs/mig.md": {
		machine: "dgx-h100",
		instead: map[string]string{
			"nvidia-smi -i 0 -mig 1": "",
			"nvidia-smi mig -i 0 -cgi 3g.40gb,2g.20gb -C": "gpu-sim fault $GPU_CDI_ROOT mig --gpu 0 " +
				"--profiles 3g.40gb,2g.20gb\n" +
				"gpu-cdi-plugin cdi generate --write", // as the service does
		},
		want: []string{isListed, "MIG 2g.20gb"},
	},
	"docs/sharing.md": {
		before: kubelet + "mkdir -p /etc/gpu-cdi-plugin",
		instead: map[string]string{
			"systemctl reload gpu-cdi-plugin": "kill -HUP $serve\n" +
				"expect=gpu.shared await device-manager node\ndevice-manager node",
		},
		want: []string{"nvidia.com/gpu.shared "},
	},
	"docs/health.md": {machine: "dgx-h100", before: kubelet, want: []string{"SINCE"}},
	"docs/leases.md": {
		machine: "dgx-h100", before: leasing, want: []string{isListed, "\nLEASE ", "\nGPU-"},
	},
	"docs/manager.md": {
		before: awaiting,
		instead: map[string]string{
			"device-manager serve --plugin 'gpu-cdi-plugin serve' &": "device-manager serve --plugin 'gpu-cdi-plugin serve' " +
				">/run/manager.log 2>&1 &\nexpect='nothing to list' await device-manager pods",
		},
		want: []string{"nvidia.com/gpu"},
	},
	"docs/doctor.md":          {want: []string{"nothing is wrong on this host"}},
	"docs/troubleshooting.md": {status: 4, want: []string{"/dev/nvidiactl"}},
	"docs/configuration.md": {
		before: kubelet,
		instead: map[string]string{
			"vi config.yaml":                  "echo 'mig-strategy: mixed' >config.yaml",
			"systemctl reload gpu-cdi-plugin": "kill -HUP $serve\ngpu-cdi-plugin config view -o table",
		},
		want: []string{"mixed"},
	},
}

// TestTheGuidesWork runs what a user copies from README.md and the guides.
func TestTheGuidesWork(t *testing.T) {
	t.Parallel()
	testenv.Root(t)
	if diff := cmp.Diff(slices.Sorted(slices.Values(guide.Names(t))), slices.Sorted(maps.Keys(documents))); diff != "" {
		t.Errorf("the documents of this test are not those of the tree (-tree +test):\n%s", diff)
	}
	for name, c := range documents {
		if c.reference || c.engine != nil {
			continue
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if c.elsewhere != "" {
				guide.First(t, name)
				t.Skip("not run here: " + c.elsewhere)
			}
			c.engine = behindPodman
			c.run(t, name)
		})
	}
}

// TestSlowTheGuidesWork does so beside the daemons that scripts/peers builds.
func TestSlowTheGuidesWork(t *testing.T) {
	t.Parallel()
	testenv.Root(t)
	for _, name := range []string{"docs/containerd.md", "docs/cri-o.md", "docs/docker.md"} {
		t.Run(name, func(t *testing.T) { documents[name].run(t, name) })
	}
}

func (c userCommands) run(t *testing.T, name string) {
	t.Helper()
	blocks := guide.Blocks(t, name)
	if name == "README.md" {
		// TestSlowTheReleaseIsPublished in test/dist runs these.
		repository := guide.Under(t, name, "Install from a repository")
		blocks = slices.DeleteFunc(blocks, func(block string) bool { return slices.Contains(repository, block) })
	} else {
		blocks = []string{guide.First(t, name)}
	}
	text := strings.Join(blocks, "\n")
	for from, to := range c.instead {
		line := regexp.MustCompile("(?m)^" + regexp.QuoteMeta(from) + "$")
		if !line.MatchString(text) {
			t.Errorf("%s has no line %q, which the test replaces", name, from)
		}
		text = line.ReplaceAllLiteralString(text, to)
	}
	machine := c.machine
	if machine == "" {
		machine = "workstation"
	}
	res := c.engine(t, simtest.Node(t, machine), c.before+"\n"+text)
	if res.Code != c.status {
		t.Fatalf("exit status %d, want %d\n%v", res.Code, c.status, res)
	}
	for _, want := range c.want {
		if !strings.Contains("\n"+res.Stdout, want) {
			t.Errorf("want %q in\n%v", want, res)
		}
	}
}

// asInstalled makes a host that a script can change while the machine stays as it is: with the hook where the package
// has it, and with the CDI spec that the service writes.
const asInstalled = `
for dir in etc usr/libexec var/lib; do
	mkdir -p /run/over/$dir /run/work/$dir
	mount -n -t overlay -o "lowerdir=/$dir,upperdir=/run/over/$dir,workdir=/run/work/$dir" overlay /$dir
done
mkdir -p /usr/libexec/gpu-cdi-plugin /run/home
cp "${0%/*}/prestart-hook" /usr/libexec/gpu-cdi-plugin/
cd /run/home
gpu-cdi-plugin cdi generate --write >&2
`

// installed returns the environment of a script that begins with asInstalled, and its command line.
func installed(t *testing.T, n *sim.Node, script string) (env, command []string) {
	t.Helper()
	programs := filepath.Dir(shared.Program(t, "gpu-cdi-plugin"))
	env = append(os.Environ(), "PATH="+programs+":"+os.Getenv("PATH")+":/usr/sbin:/sbin", "GPU_CDI_ROOT="+n.Root(),
		"GPU_CDI_HOOK_PATH=/usr/libexec/gpu-cdi-plugin/prestart-hook", "HOME=/run/home")
	return env, []string{"sh", "-ec", asInstalled + script, filepath.Join(programs, "sh")}
}

// ubuntu returns the archive of an image that has a C library, and no more.
func ubuntu(t *testing.T, tag string) string {
	t.Helper()
	archive := filepath.Join(t.TempDir(), "ubuntu.tar")
	testenv.Must(t, image.WriteArchive(archive, "docker.io/library/ubuntu:"+tag, shared.Images.Copy(t, image.Glibc),
		image.Config{Env: []string{"PATH=/usr/sbin:/usr/bin"}, Cmd: []string{"/bin/sh"}}))
	return archive
}

// behindPodman runs a script on a simulated node, with podman and runc.
func behindPodman(t *testing.T, n *sim.Node, script string) proc.Result {
	t.Helper()
	env, command := installed(t, n, "podman load --quiet --input "+ubuntu(t, "latest")+" >&2\n"+script)
	env = append(env, "PATH="+podmanDir(t)+":"+lastPath(env))
	command = engine.Namespace(t, t.TempDir(), "", engine.V1, command...)
	res, err := proc.Run(t.Context(), proc.Cmd{Env: env, Args: command})
	testenv.Must(t, err)
	return res
}

// podmanDir returns a directory with a podman whose containers have the parent cgroup that the suite removes, no
// network, since the machine may have none, and limits that a machine without CAP_SYS_RESOURCE allows.
func podmanDir(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	podman, _, _ := strings.Cut(lastPath(engine.PodmanFor(t, testenv.Command(t, "podman"), "runc")), ":")
	testenv.WriteProgram(t, filepath.Join(dir, "podman"), []byte(fmt.Sprintf(`#!/bin/sh
case $1 in
run | create)
	verb=$1
	shift
	set -- "$verb" --network none --cgroup-parent /gpu-test-%[2]d --pids-limit -1 --ulimit nofile=1024:1024 \
		--ulimit nproc=1024:1024 "$@"
	;;
esac
exec %[1]s/podman "$@"
`, podman, os.Getpid())))
	return dir
}

func lastPath(env []string) string {
	for _, v := range slices.Backward(env) {
		if list, ok := strings.CutPrefix(v, "PATH="); ok {
			return list
		}
	}
	return ""
}

// behindContainerd runs a script beside a containerd, whose containers have the cgroup that the suite removes.
func behindContainerd(t *testing.T, n *sim.Node, script string) proc.Result {
	t.Helper()
	testenv.Command(t, "runc")
	env, command := installed(t, n, script)
	env = append(env, "image="+ubuntu(t, "24.04"), fmt.Sprintf("CONTAINERD_NAMESPACE=gpu-test-%d", os.Getpid()))
	args := engine.BesideContainerd(t, shared.NodePeer(t, "containerd"), t.TempDir(), command...)
	res, err := proc.Run(t.Context(), proc.Cmd{Env: env, Args: args})
	testenv.Must(t, err)
	return res
}

// behindDocker runs a script beside a dockerd.
func behindDocker(t *testing.T, n *sim.Node, script string) proc.Result {
	t.Helper()
	env, command := installed(t, n, "docker load --quiet --input "+ubuntu(t, "latest")+" >&2\n"+script)
	res, err := proc.Run(t.Context(), proc.Cmd{Env: env, Args: besideDocker(t, t.TempDir(), command...)})
	testenv.Must(t, err)
	return res
}

var (
	link    = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	heading = regexp.MustCompile(`(?m)^#+ (.*)$`)
	dropped = regexp.MustCompile(`[^\p{L}\p{N} _-]`)
)

// TestLinksLead follows the links between documents, also to headings.
func TestLinksLead(t *testing.T) {
	t.Parallel()
	root, err := suite.Root()
	testenv.Must(t, err)
	names := append(guide.Names(t), "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "specs/README.md")
	decisions, err := os.ReadDir(filepath.Join(root, "docs/decisions"))
	testenv.Must(t, err)
	for _, file := range decisions {
		names = append(names, "docs/decisions/"+file.Name())
	}
	for _, name := range names {
		for _, match := range link.FindAllStringSubmatch(guide.Read(t, name), -1) {
			if strings.Contains(match[1], "://") {
				continue
			}
			file, anchor, _ := strings.Cut(match[1], "#")
			to := name
			if file != "" {
				to = path.Join(path.Dir(name), file)
			}
			if _, err := os.Stat(filepath.Join(root, to)); errors.Is(err, os.ErrNotExist) {
				t.Errorf("%s: the link %s leads nowhere", name, match[1])
			} else if anchor != "" && !slices.Contains(anchors(guide.Read(t, to)), anchor) {
				t.Errorf("%s: the link %s leads to no heading", name, match[1])
			}
		}
	}
}

// anchors returns the names that GitHub gives the headings of a document.
func anchors(text string) []string {
	var names []string
	for _, match := range heading.FindAllStringSubmatch(text, -1) {
		name := dropped.ReplaceAllString(strings.ToLower(match[1]), "")
		names = append(names, strings.ReplaceAll(name, " ", "-"))
	}
	return names
}

// TestSecurityNamesTests checks that the tests exist that SECURITY.md names.
func TestSecurityNamesTests(t *testing.T) {
	t.Parallel()
	root, err := suite.Root()
	testenv.Must(t, err)
	have := map[string]bool{}
	function := regexp.MustCompile(`(?m)^func (Test\w+)\(`)
	testenv.Must(t, filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		text, err := os.ReadFile(path)
		for _, match := range function.FindAllSubmatch(text, -1) {
			have[string(match[1])] = true
		}
		return err
	}))
	named := regexp.MustCompile("`(Test\\w+)`").FindAllStringSubmatch(guide.Read(t, "SECURITY.md"), -1)
	if len(named) == 0 {
		t.Error("SECURITY.md names no test")
	}
	for _, match := range named {
		if !have[match[1]] {
			t.Errorf("SECURITY.md names %s, which does not exist", match[1])
		}
	}
}
