package arguments

import (
	"encoding/json"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/internal/wording"
	"gpu-cdi-plugin/manager/model"
	"gpu-cdi-plugin/test/lib/testenv"
)

// TestPodmanUnderstandsTheArguments gives a shell a line with the arguments, as a user does, and asks podman what it
// has made of them. All of podman's files are in a mount namespace's own /run.
func TestPodmanUnderstandsTheArguments(t *testing.T) {
	testenv.Root(t)
	testenv.Command(t, "podman")
	dir := t.TempDir()
	host := filepath.Join(dir, "it's $(id):1")
	for _, d := range []string{host, filepath.Join(dir, "rootfs", "etc")} {
		testenv.Must(t, os.MkdirAll(d, 0o755))
	}
	options := everything
	options.CDIDevices = nil // podman would look for them
	options.Mounts = []model.Mount{
		{ContainerPath: "/a b", HostPath: host, ReadOnly: true}, {ContainerPath: "/c=d", HostPath: host},
	}
	options.Devices = []model.DeviceNode{
		{ContainerPath: "/dev/c d", HostPath: "/dev/null", Permissions: "mrw"},
		{ContainerPath: "/dev/e", HostPath: "/dev/zero", Permissions: "r"},
	}
	args, err := For("podman", options)
	testenv.Must(t, err)
	script := `set -e
mount -t tmpfs none /run
mount -t tmpfs none /dev/shm
podman() { command podman --root /run/root --runroot /run/runroot --storage-driver vfs --log-level error "$@"; }
podman create --network none --name x ` + wording.Line(args) +
		` --rootfs ` + wording.Quote(filepath.Join(dir, "rootfs")) + ` sleep 1 >&2
podman inspect x`
	cmd := exec.CommandContext(t.Context(), "unshare", "-m", "sh", "-c", script)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v: %s", err, stderr.String())
	}
	var containers []struct {
		Config struct {
			Env         []string
			Annotations map[string]string
		}
		Mounts []struct {
			Source, Destination string
			RW                  bool
		}
		HostConfig struct {
			Devices []struct{ PathOnHost, PathInContainer string }
		}
	}
	if err := json.Unmarshal(out, &containers); err != nil || len(containers) != 1 {
		t.Fatalf("%v in %s", err, out)
	}
	got := model.RunOptions{Envs: map[string]string{}, Annotations: map[string]string{}}
	c := containers[0]
	for _, env := range c.Config.Env {
		name, value, _ := strings.Cut(env, "=")
		got.Envs[name] = value
	}
	maps.DeleteFunc(got.Envs, func(name, _ string) bool { return options.Envs[name] == "" && name != "B" })
	for key := range options.Annotations {
		if value, ok := c.Config.Annotations[key]; ok {
			got.Annotations[key] = value
		}
	}
	for _, m := range c.Mounts {
		got.Mounts = append(got.Mounts, model.Mount{
			ContainerPath: m.Destination, HostPath: m.Source, ReadOnly: !m.RW,
		})
	}
	slices.SortFunc(got.Mounts, func(a, b model.Mount) int { return strings.Compare(a.ContainerPath, b.ContainerPath) })
	for i, d := range c.HostConfig.Devices {
		got.Devices = append(got.Devices, model.DeviceNode{
			ContainerPath: d.PathInContainer, HostPath: d.PathOnHost,
			Permissions: options.Devices[i].Permissions, // podman does not print them
		})
	}
	got.Conflicts = options.Conflicts
	if diff := cmp.Diff(options, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}
