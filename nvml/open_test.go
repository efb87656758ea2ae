package nvml

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/test/lib/testenv"
)

func TestOpenFails(t *testing.T) {
	for name, c := range map[string]struct {
		spoil func(t *testing.T, node *sim.Node)
		want  error
		text  string
	}{
		"the kernel module is not loaded": {
			func(t *testing.T, node *sim.Node) {
				for _, path := range []string{"dev/nvidiactl", "sys/module/nvidia/version", "proc/driver/nvidia/version"} {
					remove(t, filepath.Join(node.Root(), path))
				}
			},
			ErrDriverNotLoaded, "nvmlInit: ",
		},
		"the kernel module is loaded, but has no device node": {
			func(t *testing.T, node *sim.Node) { remove(t, filepath.Join(node.Root(), "dev/nvidiactl")) },
			ErrNoControlNode, "nvmlInit: ",
		},
		"the kernel module is of another version": {
			func(t *testing.T, node *sim.Node) { testenv.Must(t, node.SetKernelVersion("575.57.08")) },
			ErrVersionMismatch, "the library is 580.126.09, the kernel module 575.57.08",
		},
		"the process may not use the driver": {
			func(t *testing.T, node *sim.Node) { fail(t, node, "nvmlInit", sim.AnyGPU, nvml.ERROR_NO_PERMISSION) },
			ErrNoPermission, "nvmlInit: ",
		},
		"the driver hangs": {
			func(t *testing.T, node *sim.Node) { testenv.Must(t, node.Hang("nvmlInit", sim.AnyGPU)) },
			gpu.ErrNotAnswering, "nvmlInit has not returned",
		},
		"anything else": {
			func(t *testing.T, node *sim.Node) { fail(t, node, "nvmlInit", sim.AnyGPU, nvml.ERROR_UNKNOWN) },
			ErrDriverFailed, "nvmlInit: Unknown Error",
		},
		"the library is truncated": {
			func(t *testing.T, node *sim.Node) { truncate(t, node.Library()) },
			ErrLibraryUnusable, "the file is truncated",
		},
		"the library is removed": {
			func(t *testing.T, node *sim.Node) { remove(t, node.Library()) },
			ErrLibraryNotFound, "no such file",
		},
	} {
		t.Run(name, func(t *testing.T) {
			if !runAlone(t) {
				return
			}
			node := createNode(t, "workstation")
			c.spoil(t, node)
			opts := Options{Host: createNodeHost(t, node), Library: node.Library()}
			if errors.Is(c.want, gpu.ErrNotAnswering) {
				opts.Timeout = 500 * time.Millisecond
			}
			_, err := ReadDevices(t.Context(), opts)
			checkError(t, err, c.want, c.text)

			testenv.Must(t, node.Clear()) // a hang must end before the process does
		})
	}
}

// checkError checks an error that a host has no usable driver.
func checkError(t *testing.T, err, want error, text string) {
	t.Helper()
	if !errors.Is(err, want) || !errors.Is(err, gpu.ErrNoDriver) {
		t.Fatalf("got the error %v, want %v", err, want)
	}
	if !strings.Contains(err.Error(), text) {
		t.Errorf("the error %q does not contain %q", err, text)
	}
}

// openFile opens the library at a path.
func openFile(t *testing.T, path string) (*Session, error) {
	h, err := host.New("", "", "")
	testenv.Must(t, err)
	session := NewSession(Options{Host: h, Library: path})
	return session, session.Open(t.Context())
}

// The error has its cause, from the file or from the loader.
func TestOpenWhatIsNotNVML(t *testing.T) {
	if !runAlone(t) {
		return
	}
	dir := t.TempDir()
	notELF := filepath.Join(dir, "text.so")
	writeFile(t, notELF, "not a library")
	empty := filepath.Join(dir, "empty.so")
	writeFile(t, empty, string(createLibrary(thisMachine)))
	libm := loaderPath("libm.so.6")
	for name, c := range map[string]struct{ path, text string }{
		"another library":                   {libm, "it has no function nvmlInit"},
		"a text file":                       {notELF, "not an ELF file"},
		"a library that the loader refuses": {empty, empty + ": "},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := openFile(t, c.path)
			checkError(t, err, ErrLibraryUnusable, c.text)
		})
	}
}

func TestOpenTruncatedLibraryNeverKillsTheProcess(t *testing.T) {
	if !runAlone(t) {
		return
	}
	whole, err := os.ReadFile(createNode(t, "workstation").Library())
	testenv.Must(t, err)
	dir := t.TempDir()
	for n := len(whole) - 1; n >= 0; n -= 1 + n/97 {
		path := filepath.Join(dir, fmt.Sprint(n)) // a new file each time, since a loaded one must not be changed
		testenv.Must(t, os.WriteFile(path, whole[:n], 0o644))
		if _, err := openFile(t, path); !errors.Is(err, ErrLibraryUnusable) {
			t.Fatalf("with %d of %d bytes: error %v", n, len(whole), err)
		}
		remove(t, path)
	}
}

func TestAProcessCanOpenOneLibrary(t *testing.T) {
	if !runAlone(t) {
		return
	}
	first, second := createNode(t, "workstation"), createNode(t, "pcie-quad")
	session, h := openNode(t, first)
	_, err := openFile(t, second.Library())
	checkError(t, err, ErrLibraryConflict, first.LibDir())
	compareToNode(t, first, readTopology(t, session, h))
}

// The check refuses a library before it is loaded, which would run its code.
func TestCheckIsBeforeTheLibraryIsLoaded(t *testing.T) {
	refused := errors.New("refused")
	node := createNode(t, "workstation")
	opts := Options{Host: createNodeHost(t, node), Check: func(path string) error {
		if filepath.Base(path) != libraryName && !strings.HasPrefix(filepath.Base(path), "libnvidia-ml.so.") {
			t.Errorf("the check is of %s", path)
		}
		return refused
	}}
	if s, err := ReadDevices(t.Context(), opts); s != nil || !errors.Is(err, refused) || process.library != nil {
		t.Errorf("got %v, error %v", s, err)
	}
}

// A process that waits for the driver tries to open the library until it works. It can close it and open it again.
func TestOpenAgain(t *testing.T) {
	if !runAlone(t) {
		return
	}
	node := createNode(t, "workstation")
	h := createNodeHost(t, node)
	session := NewSession(Options{Host: h})
	fail(t, node, "nvmlInit", sim.AnyGPU, nvml.ERROR_DRIVER_NOT_LOADED)
	for range 3 {
		checkError(t, session.Open(t.Context()), ErrNoControlNode, "")
	}
	testenv.Must(t, node.Hang("nvmlInit", sim.AnyGPU))
	session.opts.Timeout = 100 * time.Millisecond
	for range 2 {
		checkError(t, session.Open(t.Context()), gpu.ErrNotAnswering, "nvmlInit has not returned")
	}
	testenv.Must(t, node.Clear())
	session.opts.Timeout = DefaultTimeout
	waitUntil(t, "the driver answers", func() bool { return session.Open(t.Context()) == nil })
	for i := range 3 {
		compareToNode(t, node, readTopology(t, session, h))
		if err := session.Close(); err != nil {
			t.Errorf("time %d: %v", i, err)
		}
	}
}
