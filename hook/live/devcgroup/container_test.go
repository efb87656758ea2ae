package devcgroup

import (
	"os"
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"

	"gpu-cdi-plugin/test/lib/engine"
	"gpu-cdi-plugin/test/lib/image"
	"gpu-cdi-plugin/test/lib/testenv"
)

const (
	admitted = "No such device or address" // the device has no driver
	denied   = "Operation not permitted"
)

// open is a script that makes nodes of the allowed device, of the one beside it, and of a block device with the same
// numbers, and opens them.
const openScript = `
mknod /gpu c 195 7; mknod /other c 195 8; mknod /block b 195 7
for node in gpu other block; do
	echo "$node r $( (: </$node) 2>&1)"
	echo "$node w $( (: >/$node) 2>&1)"
done`

func TestContainers(t *testing.T) {
	testenv.Root(t)
	for name, c := range map[string]struct {
		hook string
		want string
	}{
		"without a rule": {"", denied},
		"allowed":        {"allow", admitted},
		"allowed twice":  {"allow allow", admitted},
	} {
		for _, e := range []*engine.Bare{
			{Runtime: "runc", Cgroup: engine.V1, Images: images},
			{Runtime: "crun", Cgroup: engine.V1, Images: images},
			{Runtime: "runc", Cgroup: engine.V2, Images: images},
		} {
			t.Run(e.String()+"/"+name, func(t *testing.T) {
				t.Parallel()
				out := runContainer(t, e, c.hook)
				for node, want := range map[string]string{"gpu": c.want, "other": denied, "block": denied} {
					for _, mode := range []string{" r ", " w "} {
						if got := line(out, node+mode); !strings.Contains(got, want) {
							t.Errorf("%s%s: got %q, want %q", node, mode, got, want)
						}
					}
				}
			})
		}
	}
}

// runContainer runs the script in a container whose createRuntime hook is this program, and returns its output.
func runContainer(t *testing.T, e *engine.Bare, does string) string {
	t.Helper()
	container := engine.Container{Mknod: true, Args: []string{"sh", "-c", openScript}}
	bundle := e.Bundle(t, images.Copy(t, image.Static), container)
	err := bundle.Edit(func(s *specs.Spec) error {
		self, err := os.Executable()
		s.Hooks = &specs.Hooks{CreateRuntime: []specs.Hook{{Path: self, Env: []string{hookVariable + "=" + does}}}}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	res := e.Start(t, bundle)
	if res.Code != 0 {
		t.Fatal(res)
	}
	return res.Stdout
}

func line(out, prefix string) string {
	for l := range strings.Lines(out) {
		if strings.HasPrefix(l, prefix) {
			return l
		}
	}
	return ""
}
