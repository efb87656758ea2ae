package demo

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/test/lib/testenv"
)

const twoGPUs = `GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-2)
  MIG 1g.10gb     Device  0: (UUID: MIG-3)
`

func TestCheckWantsExactlyWhatWasGiven(t *testing.T) {
	for name, c := range map[string]struct {
		output string
		want   []string
		err    string
	}{
		"all of it, in any order":   {twoGPUs, []string{"MIG-3", "GPU-2", "GPU-1"}, ""},
		"one that was not given":    {twoGPUs, []string{"GPU-1", "GPU-2"}, "was given GPU-1, GPU-2 and saw GPU-1, GPU-2, MIG-3"},
		"one that is not seen":      {twoGPUs, []string{"GPU-1", "GPU-2", "MIG-3", "GPU-4"}, "GPU-4, MIG-3 and saw GPU-1, GPU-2, MIG-3"},
		"one of the wrong kind":     {"GPU 0: X (UUID: GPU-1)\n", []string{"GPU-2"}, "was given GPU-2 and saw GPU-1"},
		"nothing seen":              {"No devices were found\n", []string{"GPU-1"}, "saw nothing"},
		"one of them is seen twice": {"(UUID: GPU-1)(UUID: GPU-1)", []string{"GPU-1"}, "saw GPU-1, GPU-1"},
	} {
		t.Run(name, func(t *testing.T) {
			err := Check(c.output, c.want)
			if c.err == "" && err != nil {
				t.Errorf("Check: %v", err)
			}
			if c.err != "" && (err == nil || !strings.Contains(err.Error(), c.err)) {
				t.Errorf("Check: %v, want %q in it", err, c.err)
			}
		})
	}
}

func TestStepsPrintsALineForEach(t *testing.T) {
	var b strings.Builder
	s := NewSteps(&b)
	clock := time.Unix(0, 0)
	s.now = func() time.Time { clock = clock.Add(250 * time.Millisecond); return clock }
	_ = s.Do("spec", func() (string, error) { return "17 devices", nil })
	s.Show("GPU 0\nGPU 1\n")
	s.Skip("podman", "not installed")
	err := s.Do("runc", func() (string, error) { return "", errors.New("it broke") })
	if err == nil || err.Error() != "it broke" {
		t.Errorf("Do: %v, want the step's error", err)
	}
	pad := strings.Repeat(" ", 79)
	want := "spec       17 devices" + pad + "    0.25 s\n    | GPU 0\n    | GPU 1\npodman     skipped: not installed\n" +
		"runc       not done" + pad + "      0.25 s\n"
	if diff := cmp.Diff(want, b.String()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// busyboxRoot is a root in which sh runs, out of this machine's files.
func busyboxRoot(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "rootfs")
	root, err := NewRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	box := testenv.Command(t, "busybox")
	if err := errors.Join(root.Copy(box, "/bin/busybox"), root.AddNeeds(box), root.Link("busybox", "/bin/sh")); err != nil {
		t.Fatal(err)
	}
	return dir
}

// shortDir is a directory whose name podman takes.
func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := MakeDir()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func TestARuntimeRunsADynamicProgramOfThisHost(t *testing.T) {
	testenv.Root(t)
	for _, name := range []string{"runc"} {
		runtime := &Runtime{Path: testenv.Command(t, name), State: t.TempDir()}
		bundle := filepath.Join(shortDir(t), "bundle")
		root, err := NewRoot(filepath.Join(bundle, "rootfs"))
		if err != nil {
			t.Fatal(err)
		}
		echo := testenv.Command(t, "echo")
		if err := errors.Join(root.Copy(echo, "/bin/echo"), root.AddNeeds(echo), WriteBundle(bundle, []string{"echo", "hello"})); err != nil {
			t.Fatal(err)
		}
		got, err := runtime.Run(t.Context(), bundle)
		if err != nil || got != "hello\n" {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
}

func TestAnEndedContextRemovesTheContainer(t *testing.T) {
	testenv.Root(t)
	dir := shortDir(t)
	bundle := filepath.Join(dir, "bundle")
	if err := os.MkdirAll(bundle, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(busyboxRoot(t), filepath.Join(bundle, "rootfs")); err != nil {
		t.Fatal(err)
	}
	if err := WriteBundle(bundle, []string{"sh", "-c", "while :; do :; done"}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	runtime := &Runtime{Path: testenv.Command(t, "runc"), State: filepath.Join(dir, "state")}
	if _, err := runtime.Run(ctx, bundle); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Run: %v, want the context's error", err)
	}
	left, err := os.ReadDir(runtime.State)
	if err != nil || len(left) > 0 {
		t.Errorf("the runtime still knows %v, %v", left, err)
	}
}

func TestPodmanReadsSpecsFromTheDirectoryItIsGiven(t *testing.T) {
	testenv.Root(t)
	dir, specs := shortDir(t), t.TempDir()
	spec := `{"cdiVersion": "0.5.0", "kind": "example.com/demo",
		"devices": [{"name": "x", "containerEdits": {"env": ["SEEN=yes"]}}]}`
	if err := os.WriteFile(filepath.Join(specs, "demo.json"), []byte(spec), 0o644); err != nil {
		t.Fatal(err)
	}
	_, before := os.Stat(cdiDir)
	podman := &Podman{Path: testenv.Command(t, "podman"), Runtime: testenv.Command(t, "runc"), Dir: dir, CDIDir: specs}
	got, err := podman.Run(t.Context(), busyboxRoot(t), []string{"example.com/demo=x"}, []string{"sh", "-c", "echo $SEEN"})
	if err != nil || got != "yes\n" {
		t.Errorf("podman: %q, %v", got, err)
	}
	if _, after := os.Stat(cdiDir); (before == nil) != (after == nil) {
		t.Errorf("%s: %v before, %v after", cdiDir, before, after)
	}
	if _, err := os.Stat(filepath.Join(cdiDir, "demo.json")); err == nil {
		t.Errorf("the host's %s has the spec", cdiDir)
	}
	if left, _ := filepath.Glob("/sys/fs/cgroup/*" + podman.cgroup()); len(left) > 0 {
		t.Errorf("cgroups are left: %v", left)
	}
}

func TestMissingLibrariesAreLeftToTheContainersDevices(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "rootfs")
	root, err := NewRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := root.AddNeeds("/etc/passwd"); err == nil {
		t.Error("a text file has needs")
	}
	if _, ok := root.find("libno-such-library.so.1"); ok {
		t.Error("found a library that cannot be")
	}
	if path, ok := root.find("libc.so.6"); !ok {
		t.Error("the C library was not found")
	} else if err := errors.Join(root.Copy(path, path), root.Copy(path, path)); err != nil {
		t.Errorf("a file that two need: %v", err)
	}
}
