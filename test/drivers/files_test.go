package drivers

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/test/lib/testenv"
)

// testFiles compares what a container gets with the list for exactly this version.
func (n *node) testFiles(t *testing.T) {
	got := strings.Join(n.files(n.spec(t)), "\n") + "\n"
	golden := n.golden()
	if *update {
		testenv.Must(t, os.WriteFile(golden, []byte(got), 0o644))
		return
	}
	want, err := os.ReadFile(golden)
	if errors.Is(err, fs.ErrNotExist) {
		t.Skipf("the version %s is new: its files are not compared with a list; -args -write-files writes it", n.version)
	}
	testenv.Must(t, err)
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("the files of driver %s (-%s +got):\n%s", n.version, golden, diff)
	}
}

// golden is the list of the files of exactly this version.
func (d *driver) golden() string { return filepath.Join("testdata", d.version+".files") }

// spec returns the spec of the node.
func (n *node) spec(t *testing.T, options ...string) *specs.Spec {
	t.Helper()
	spec := &specs.Spec{}
	res := plugin(t, 0, n.root, append(options, "cdi", "generate", "-o", "json")...)
	testenv.Must(t, json.Unmarshal([]byte(res.Stdout), spec))
	return spec
}

// external is a library with a version of its own, which the base system has.
var external = regexp.MustCompile(`(libnvidia-egl-\w+\.so)(\.1)\.[0-9.]+`)

// files are the mounts of a spec, and the arguments of its hook.
func (n *node) files(spec *specs.Spec) (lines []string) {
	for _, m := range spec.ContainerEdits.Mounts {
		line := "mount " + strings.TrimPrefix(m.HostPath, n.root)
		if m.ContainerPath != strings.TrimPrefix(m.HostPath, n.root) {
			line += " as " + m.ContainerPath
		}
		lines = append(lines, line)
	}
	for _, h := range spec.ContainerEdits.Hooks {
		for _, arg := range h.Args[1:] {
			lines = append(lines, fmt.Sprintf("%s %s", h.HookName, strings.ReplaceAll(arg, n.root, "")))
		}
	}
	for i := range lines {
		lines[i] = external.ReplaceAllString(lines[i], "$1$2.*")
	}
	slices.Sort(lines)
	return slices.Compact(lines)
}
