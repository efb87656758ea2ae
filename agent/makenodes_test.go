package agent

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/agent/prepare"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/internal/trust"
	"gpu-cdi-plugin/sim/simtest"
	"gpu-cdi-plugin/test/lib/testenv"
)

// modprobe is an nvidia-modprobe that makes nodes as the driver's does, and logs how it was called.
const modprobe = `#!/bin/sh
echo "$*" >>"$0.log"
make() { mkdir -p "$(dirname "DEV/$1")" && { [ -e "DEV/$1" ] || mknod "DEV/$1" c "$2" "$3"; }; }
case "$*" in
"-c 255") make nvidiactl 195 255 ;;
"-u -c 0") make nvidia-uvm 511 0 && make nvidia-uvm-tools 511 1 ;;
-m) make nvidia-modeset 195 254 ;;
"-f "*) minor=$(sed -n 's/DeviceFileMinor: //p' "ROOT$2") && make "nvidia-caps/nvidia-cap$minor" 510 "$minor" ;;
"-c "*) make "nvidia$2" 195 "$2" ;;
esac
`

func TestMakeNodes(t *testing.T) {
	testenv.Root(t)
	accept := func(string) error { return nil }
	for name, c := range map[string]struct {
		remove, script string
		stale          map[string]uint64 // nodes that get other numbers
		stays, gone    bool              // they keep them, or are removed
		check          func(string) error
		calls, made    []string
		err            string
	}{
		"nothing is missing": {script: modprobe, check: accept},
		"after a boot": {
			remove: "nvidia*", script: modprobe, check: accept,
			calls: []string{
				"-c 255", "-u -c 0", "-c 0", "-c 1",
				"-f /proc/driver/nvidia/capabilities/gpu1/mig/gi2/access",
				"-f /proc/driver/nvidia/capabilities/gpu1/mig/gi2/ci0/access", "-m",
			},
			made: []string{
				"nvidiactl", "nvidia-uvm", "nvidia0", "nvidia1", "nvidia-caps/nvidia-cap5", "nvidia-caps/nvidia-cap6",
				"nvidia-modeset",
			},
		},
		"without unified memory": {
			remove: "nvidia-uvm*", script: modprobe, check: accept,
			calls: []string{"-u -c 0"}, made: []string{"nvidia-uvm"},
		},
		"unified memory has the number from before a reboot": {
			stale: map[string]uint64{"nvidia-uvm": unix.Mkdev(250, 0)}, script: modprobe, check: accept,
			calls: []string{"-u -c 0", "-u -c 0"}, made: []string{"nvidia-uvm"},
		},
		"a GPU has the number of another one, and a MIG device an older one": {
			stale:  map[string]uint64{"nvidia0": unix.Mkdev(195, 1), "nvidia-caps/nvidia-cap6": unix.Mkdev(510, 5)},
			script: modprobe, check: accept,
			calls: []string{
				"-c 0", "-c 0", "-f /proc/driver/nvidia/capabilities/gpu1/mig/gi2/ci0/access",
				"-f /proc/driver/nvidia/capabilities/gpu1/mig/gi2/ci0/access",
			},
			made: []string{"nvidia0", "nvidia-caps/nvidia-cap6"},
		},
		"unified memory and its tools have another number": {
			stale:  map[string]uint64{"nvidia-uvm": unix.Mkdev(250, 0), "nvidia-uvm-tools": unix.Mkdev(250, 1)},
			script: modprobe, check: accept,
			calls: []string{"-u -c 0", "-u -c 0", "-u -c 0", "-u -c 0"}, made: []string{"nvidia-uvm", "nvidia-uvm-tools"},
		},
		"a node of MIG's settings has another number": {
			stale: map[string]uint64{"nvidia-caps/nvidia-cap1": unix.Mkdev(250, 1)}, script: modprobe, check: accept, gone: true,
		},
		"a node with a wrong number stays if the program cannot run": {
			stale: map[string]uint64{"nvidia-uvm": unix.Mkdev(250, 0)}, script: "#!/bin/sh\necho \"$*\" >>\"$0.log\"\nexit 1",
			check: accept, calls: []string{"-u -c 0"}, stays: true,
			err: "make DEV/nvidia-uvm with PROGRAM: exit status 1",
		},
		"without the module for graphics": {
			remove: "nvidia-modeset", script: "#!/bin/sh\necho \"$*\" >>\"$0.log\"\nexit 1", check: accept,
			calls: []string{"-m"},
		},
		"it makes nothing": {
			remove: "nvidia-uvm", script: "#!/bin/sh\necho \"$*\" >>\"$0.log\"", check: accept,
			calls: []string{"-u -c 0"}, err: "make DEV/nvidia-uvm with PROGRAM: it did not make the node",
		},
		"without a module there is one call": {
			remove: "nvidia*", script: "#!/bin/sh\necho \"$*\" >>\"$0.log\"\necho no module\nexit 1", check: accept,
			calls: []string{"-c 255"}, err: "make DEV/nvidiactl with PROGRAM: exit status 1: no module",
		},
		"others can change it": {
			remove: "nvidia-uvm", script: modprobe,
			check: func(path string) error { return errors.Join(trust.ErrUnsafe, errors.New(path)) },
			err:   "make DEV/nvidia-uvm with PROGRAM: others can change it PROGRAM",
		},
	} {
		t.Run(name, func(t *testing.T) {
			root := simtest.Node(t, "pcie-pair").Root()
			dev := filepath.Join(root, "dev")
			addInstance(t, root)
			names, err := filepath.Glob(filepath.Join(dev, c.remove))
			testenv.Must(t, err)
			for _, name := range names {
				if name != dev {
					testenv.Must(t, os.RemoveAll(name))
				}
			}
			for name, number := range c.stale {
				path := filepath.Join(dev, name)
				testenv.Must(t, os.Remove(path), unix.Mknod(path, unix.S_IFCHR|0o666, int(number)))
			}
			program := filepath.Join(t.TempDir(), "nvidia-modprobe")
			testenv.WriteProgram(t, program, []byte(strings.NewReplacer("DEV", dev, "ROOT", root).Replace(c.script)))
			h, err := host.New(root, "", "")
			testenv.Must(t, err)

			made, err := MakeNodes(t.Context(), h, prepare.Program{Path: program}, c.check)
			text := ""
			if err != nil {
				text = strings.NewReplacer(dev, "DEV", program, "PROGRAM", "\n", " ").Replace(err.Error())
			}
			if text != c.err {
				t.Errorf("the error is %q, want %q", text, c.err)
			}
			for i := range made {
				made[i] = strings.TrimPrefix(made[i], dev+"/")
			}
			if diff := cmp.Diff(c.made, made); diff != "" {
				t.Errorf("nodes (-want +got):\n%s", diff)
			}
			for name, number := range c.stale {
				var st unix.Stat_t
				err := unix.Lstat(filepath.Join(dev, name), &st)
				if (err == unix.ENOENT) != c.gone || err == nil && (st.Rdev == number) != c.stays {
					t.Errorf("%s has the number %d:%d (%v)", name, unix.Major(st.Rdev), unix.Minor(st.Rdev), err)
				}
			}
			log, _ := os.ReadFile(program + ".log")
			if diff := cmp.Diff(strings.Join(c.calls, "\n"), strings.TrimSpace(string(log))); diff != "" {
				t.Errorf("calls (-want +got):\n%s", diff)
			}
		})
	}
}

// addInstance adds a MIG instance to a node, with its device nodes.
func addInstance(t *testing.T, root string) {
	t.Helper()
	dir := filepath.Join(root, "proc/driver/nvidia/capabilities/gpu1/mig/gi2")
	testenv.Must(t, os.MkdirAll(dir+"/ci0", 0o755),
		os.WriteFile(dir+"/access", []byte("DeviceFileMinor: 5\n"), 0o444),
		os.WriteFile(dir+"/ci0/access", []byte("DeviceFileMinor: 6\n"), 0o444),
		os.MkdirAll(root+"/dev/nvidia-caps", 0o755))
	for _, minor := range []int{5, 6} {
		path := fmt.Sprintf("%s/dev/nvidia-caps/nvidia-cap%d", root, minor)
		testenv.Must(t, unix.Mknod(path, unix.S_IFCHR|0o444, int(unix.Mkdev(510, uint32(minor)))))
	}
}
