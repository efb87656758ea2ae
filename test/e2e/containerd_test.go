package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"gpu-cdi-plugin/test/lib/engine"
	"gpu-cdi-plugin/test/lib/image"
	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/testenv"
)

// TestSlowAnnotationsInContainerd has containerd start its containers by gpu-cdi-runtime. containerd shows an error
// only if it is in the runtime's log.
func TestSlowAnnotationsInContainerd(t *testing.T) {
	t.Parallel()
	testenv.Root(t)
	testenv.Command(t, "runc")
	n := shared.Node(t, "workstation")
	all := requests(t, n)["an index"]
	wrapper := filepath.Join(t.TempDir(), "gpu-cdi-runtime")
	testenv.Must(t, os.Symlink(shared.Program(t, "prestart-hook"), wrapper))
	run := func(device string) proc.Result {
		t.Helper()
		last := device[len(device)-1:]
		args := append(engine.BesideContainerd(t, shared.NodePeer(t, "containerd"), n.CDIDir),
			shared.NodePeer(t, "ctr"), "run", "--rm", "--runc-binary", wrapper, "--env", "PATH=/usr/sbin:/usr/bin",
			"--annotation", "cdi.k8s.io/a="+device,
			// Below the cgroup that the suite removes at its end.
			"--cgroup", fmt.Sprintf("/gpu-test-%d/ctr-%s", os.Getpid(), last),
			"--rootfs", shared.Images.Copy(t, image.Glibc), fmt.Sprintf("gpu-test-%d-%s", os.Getpid(), last))
		res, err := proc.Run(t.Context(), proc.Cmd{Args: append(args, smi()...)})
		testenv.Must(t, err)
		return res
	}
	checkList(t, run(names(all.names...)[0]), all.want)
	res := run("nvidia.com/gpu=9")
	if want := "device nvidia.com/gpu=9 does not exist"; res.Code == 0 || !strings.Contains(res.Stderr, want) {
		t.Errorf("want an error with %q, got %v", want, res)
	}
}

// withEtc runs a command with the files of a directory added to /etc.
const withEtc = `
set -e
etc=$1
shift
mount -n -t overlay -o "lowerdir=$etc:/etc" overlay /etc
exec "$@"
`

// TestSlowContainerdReadsWhatHookInstallWrites has containerd print its configuration after hook install: with a part
// of ours in config.toml, and with a drop-in.
func TestSlowContainerdReadsWhatHookInstallWrites(t *testing.T) {
	t.Parallel()
	testenv.Root(t)
	containerd := shared.NodePeer(t, "containerd")
	unshare := testenv.Command(t, "unshare")
	defaults := proc.Must(t, 0, proc.Cmd{Args: []string{containerd, "config", "default"}}).Stdout
	for name, config := range map[string]string{
		"no config.toml": "",
		"version 2": "version = 2\n[plugins.'io.containerd.grpc.v1.cri'.containerd.runtimes.runc.options]\n" +
			"SystemdCgroup = true",
		"version 3":         "version = 3\n",
		"containerd's own":  defaults,
		"without a drop-in": strings.Replace(defaults, "imports = ", "# imports = ", 1),
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			file := filepath.Join(root, "etc/containerd/config.toml")
			if config != "" {
				if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o755),
					os.WriteFile(file, []byte(config), 0o644)); err != nil {
					t.Fatal(err)
				}
			}
			wrapper := hookInstalled(t, root, "containerd")
			if drop, err := filepath.Glob(filepath.Join(root, "etc/containerd/conf.d/*.toml")); err != nil ||
				(len(drop) == 1) != (name == "containerd's own") {
				t.Errorf("drop-ins: %q, %v", drop, err)
			}
			got := proc.Must(t, 0, proc.Cmd{Args: []string{
				unshare, "--mount", "--propagation", "private", "sh", "-c", withEtc, "sh", filepath.Join(root, "etc"),
				containerd, "config", "dump",
			}}).Stdout
			runc, ours := runtimeOptions(got, "runc"), runtimeOptions(got, "gpu-cdi")
			if !strings.Contains(ours, "BinaryName = '"+wrapper+"'") || runc == "" ||
				strings.Contains(ours, "SystemdCgroup = true") != strings.Contains(runc, "SystemdCgroup = true") {
				t.Errorf("the options of runc are %q, those of gpu-cdi %q", runc, ours)
			}
		})
	}
}

// runtimeOptions are the lines of the options of a runtime in containerd's configuration.
func runtimeOptions(config, runtime string) string {
	_, options, _ := strings.Cut(config, ".containerd.runtimes."+runtime+".options]\n")
	options, _, _ = strings.Cut(options, "[")
	return options
}
