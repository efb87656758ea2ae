package doctor

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/test/lib/testenv"
)

// hostileFiles are files that the doctor reads and other programs write.
var hostileFiles = []string{
	"etc/containers/containers.conf", "etc/containerd/config.toml", "etc/crio/crio.conf", "etc/docker/daemon.json",
	"etc/nvidia-container-runtime/config.toml", "etc/nerdctl/nerdctl.toml", "etc/default/docker", "var/lib/dpkg/status",
	"var/lib/kubelet/config.yaml", "etc/cdi/x.json", "run/cdi/y.yaml", "usr/share/containers/oci/hooks.d/z.json",
	"var/lib/gpu-cdi-plugin/hook-install.json",
}

// Whatever other programs have written, the examination ends, and says what it could not read.
func TestHostileFiles(t *testing.T) {
	t.Parallel()
	for name, replace := range map[string]func(t *testing.T, path string){
		"FIFOs": func(t *testing.T, path string) { t.Helper(); testenv.Must(t, unix.Mkfifo(path, 0o644)) },
		"directories": func(t *testing.T, path string) {
			t.Helper()
			testenv.Must(t, os.Mkdir(path, 0o755))
		},
		"links to themselves": func(t *testing.T, path string) {
			t.Helper()
			testenv.Must(t, os.Symlink(filepath.Base(path), path))
		},
		"links out of the host": func(t *testing.T, path string) {
			t.Helper()
			testenv.Must(t, os.Symlink("../../../../../../../../../../dev/zero", path))
		},
		"zeros": func(t *testing.T, path string) {
			t.Helper()
			testenv.Must(t, os.WriteFile(path, make([]byte, 1<<16), 0o644))
		},
		"deep nesting": func(t *testing.T, path string) {
			t.Helper()
			testenv.Must(t, os.WriteFile(path, []byte(strings.Repeat("[", 1<<16)), 0o644))
		},
		"sparse files": func(t *testing.T, path string) {
			t.Helper()
			testenv.Must(t, os.WriteFile(path, nil, 0o644), os.Truncate(path, 1<<36))
		},
		"other types": func(t *testing.T, path string) {
			t.Helper()
			testenv.Must(t, os.WriteFile(path, []byte("[1, 2]\n"), 0o644))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := kubeNode(t)
			for _, program := range []string{"podman", "dockerd", "crio"} {
				h.program("usr/bin/" + program)
			}
			for _, file := range hostileFiles {
				testenv.Must(t, os.MkdirAll(filepath.Dir(h.at(file)), 0o755), os.RemoveAll(h.at(file)))
				replace(t, h.at(file))
			}
			list := Examine(t.Context(), h.options)
			if len(list) == 0 {
				t.Error("nothing is wrong")
			}
			for _, f := range list {
				if n := len(fmt.Sprint(f)); n > 3000 {
					t.Errorf("a finding has %d bytes", n)
				}
			}
		})
	}
}
