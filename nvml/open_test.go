package nvml

import (
	"debug/elf"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"gpu-cdi-plugin/internal/exit"
	"gpu-cdi-plugin/sim"
)

func TestOpenFailsWithStatusAndHint(t *testing.T) {
	for name, c := range map[string]struct {
		spoil func(t *testing.T, node *sim.Node)
		want  error
		text  string
		hint  string
	}{
		"the kernel module is not loaded": {
			func(t *testing.T, node *sim.Node) { remove(t, filepath.Join(node.Root(), "dev/nvidiactl")) },
			ErrDriverNotLoaded, "nvmlInit: ", "modprobe nvidia",
		},
		"the kernel module is of another version": {
			func(t *testing.T, node *sim.Node) { must(t, node.SetKernelVersion("575.57.08")) },
			ErrVersionMismatch, "the library is 580.126.09, the kernel module 575.57.08", "reboot",
		},
		"the process may not talk to the driver": {
			func(t *testing.T, node *sim.Node) { fail(t, node, "nvmlInit", sim.AnyGPU, nvml.ERROR_NO_PERMISSION) },
			ErrNoPermission, "nvmlInit: ", "run as root",
		},
		"the driver hangs": {
			func(t *testing.T, node *sim.Node) { must(t, node.Hang("nvmlInit", sim.AnyGPU)) },
			ErrNoAnswer, "nvmlInit has not returned", "dmesg",
		},
		"anything else": {
			func(t *testing.T, node *sim.Node) { fail(t, node, "nvmlInit", sim.AnyGPU, nvml.ERROR_UNKNOWN) },
			nil, "nvmlInit: Unknown Error", "dmesg",
		},
		"the library is truncated": {
			func(t *testing.T, node *sim.Node) { truncate(t, node.Library()) },
			ErrLibraryUnusable, "the file is truncated", "damaged",
		},
		"the library is gone": {
			func(t *testing.T, node *sim.Node) { remove(t, node.Library()) },
			ErrLibraryNotFound, "no such file", "--nvml-library",
		},
	} {
		t.Run(name, func(t *testing.T) {
			if !alone(t) {
				return
			}
			node := nodeOf(t, "workstation")
			c.spoil(t, node)
			_, err := Open(node.Library(), WithHost(hostOf(t, node)), WithTimeout(500*time.Millisecond))
			checkError(t, err, c.want, c.text, c.hint)

			must(t, node.Clear()) // a hang must end before the process does
		})
	}
}

// checkError checks an error that stands for a driver that cannot be used.
func checkError(t *testing.T, err, want error, text, hint string) {
	t.Helper()
	if err == nil || want != nil && !errors.Is(err, want) {
		t.Fatalf("got the error %v, want %v", err, want)
	}
	if exit.CodeOf(err) != exit.NoDriver {
		t.Errorf("the error %q has status %d, want 10", err, exit.CodeOf(err))
	}
	if !strings.Contains(err.Error(), text) {
		t.Errorf("the error %q does not say %q", err, text)
	}
	if !strings.Contains(exit.HintOf(err), hint) {
		t.Errorf("the hint %q does not say %q", exit.HintOf(err), hint)
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func fail(t testing.TB, node *sim.Node, function string, gpu int, code nvml.Return) {
	t.Helper()
	must(t, node.Fail(function, gpu, int(code)))
}

func remove(t testing.TB, path string) {
	t.Helper()
	must(t, os.Remove(path))
}

func truncate(t testing.TB, path string) {
	t.Helper()
	info, err := os.Stat(path)
	must(t, err)
	must(t, os.Truncate(path, info.Size()/2))
}

// What the loader or the file says is in the error, and the process survives.
func TestOpenWhatIsNotNVML(t *testing.T) {
	if !alone(t) {
		return
	}
	dir := t.TempDir()
	notELF := filepath.Join(dir, "text.so")
	writeFile(t, notELF, "not a library")
	empty := filepath.Join(dir, "empty.so")
	writeFile(t, empty, string(library(elf.Machine(thisPlatform().machine))))
	for name, c := range map[string]struct {
		path       string
		want       error
		text, hint string
	}{
		"a name that the loader does not know":    {"libnone-such.so.1", ErrLibraryNotFound, "libnone-such.so.1: cannot open shared object file", "--nvml-library"},
		"a library of something else":             {"libm.so.6", ErrLibraryUnusable, "it has no function nvmlInit", "libnvidia-ml.so.1"},
		"a text file":                             {notELF, ErrLibraryUnusable, "not an ELF file", "libnvidia-ml.so.1"},
		"a library that the loader does not like": {empty, ErrLibraryUnusable, empty + ": ", "damaged"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Open(c.path)
			checkError(t, err, c.want, c.text, c.hint)
		})
	}
}

func TestOpenTruncatedLibraryNeverKillsTheProcess(t *testing.T) {
	if !alone(t) {
		return
	}
	whole, err := os.ReadFile(nodeOf(t, "workstation").Library())
	must(t, err)
	dir := t.TempDir()
	for n := len(whole) - 1; n >= 0; n -= 1 + n/97 {
		path := filepath.Join(dir, fmt.Sprint(n)) // a new file each time, since a loaded one must not be changed
		must(t, os.WriteFile(path, whole[:n], 0o644))
		if l, err := Open(path); !errors.Is(err, ErrLibraryUnusable) || exit.CodeOf(err) != exit.NoDriver {
			t.Fatalf("with %d of %d bytes: got %v and error %v", n, len(whole), l, err)
		}
		remove(t, path)
	}
}

func TestOneLibraryInAProcess(t *testing.T) {
	if !alone(t) {
		return
	}
	first, second := nodeOf(t, "workstation"), nodeOf(t, "pcie-quad")
	l, h := opened(t, first)
	_, err := Open(second.Library())
	checkError(t, err, ErrLibraryConflict, "libnvidia-ml.so", "start the process again")

	again, err := Open(first.Library())
	must(t, err)
	if len(snapshotOf(t, again, h).Devices) != 1 {
		t.Error("the library opened again shows another machine")
	}
	must(t, again.Close())
	compareToNode(t, first, snapshotOf(t, l, h))
	if want := filepath.Join(first.Root(), first.LibDir()); !strings.HasPrefix(l.Path(), want+"/libnvidia-ml.so.") {
		t.Errorf("the library's path is %q, want one in %q", l.Path(), want)
	}
}

// A process that waits for the driver opens the library until it works, and again after it was closed.
func TestOpenAgain(t *testing.T) {
	if !alone(t) {
		return
	}
	node := nodeOf(t, "workstation")
	h := hostOf(t, node)
	fail(t, node, "nvmlInit", sim.AnyGPU, nvml.ERROR_DRIVER_NOT_LOADED)
	for range 3 {
		_, err := Open(node.Library())
		checkError(t, err, ErrDriverNotLoaded, "", "modprobe")
	}
	must(t, node.Hang("nvmlInit", sim.AnyGPU))
	for range 2 {
		_, err := Open(node.Library(), WithTimeout(100*time.Millisecond))
		checkError(t, err, ErrNoAnswer, "nvmlInit has not returned", "dmesg")
	}
	must(t, node.Clear())
	for i := range 3 {
		l := openedSoon(t, node)
		compareToNode(t, node, snapshotOf(t, l, h))
		if err := l.Close(); err != nil {
			t.Errorf("time %d: %v", i, err)
		}
	}
}

// openedSoon opens the node's library when the calls that were left behind have returned.
func openedSoon(t *testing.T, node *sim.Node) *Library {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		l, err := Open(node.Library())
		if err == nil {
			return l
		}
		if !errors.Is(err, ErrNoAnswer) || time.Now().After(end) {
			t.Fatal(fmt.Errorf("after the hang: %w", err))
		}
	}
}
