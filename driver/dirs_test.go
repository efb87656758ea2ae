package driver

import (
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/test/lib/testenv"
)

// Hosts for containers have the driver's files in directories of their own. A container gets them where its programs
// search.
func TestDiscoverInDirectoriesOfContainerHosts(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		libraries, programs, firmware, sockets string // directories
		library                                string // directory of the library that NVML was found in
		dirs                                   []string
	}{
		"a directory beside that of NVML's library": {
			"/home/kubernetes/bin/nvidia/lib64", "/home/kubernetes/bin/nvidia/bin", "/home/kubernetes/bin/nvidia/firmware",
			"/run", "/home/kubernetes/bin/nvidia/lib64", nil,
		},
		"a named directory": {
			"/opt/nvidia/lib", "/opt/nvidia/sbin", "/opt/nvidia/lib/firmware", "/opt/nvidia/run", "",
			[]string{"/opt/nvidia"},
		},
		"several named directories": {
			"/usr/local/glibc/usr/lib", "/extensions/programs", "/extensions/firmware", "/extensions/run", "",
			[]string{"/usr/local/glibc/usr", "/extensions/programs", "/extensions"},
		},
		"the usual directories": {"/usr/lib64", "/usr/local/bin", "/lib/firmware", "/var/run", "", nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newTree(t)
			r.core(c.libraries, testVersion)
			r.file(c.programs+"/nvidia-smi", "", 0o755)
			r.file(c.firmware+"/nvidia/"+testVersion+"/gsp_ga10x.bin", "", 0o644)
			r.socket(c.sockets + "/nvidia-persistenced/socket")
			h := r.host().WithDirs(c.dirs)
			if c.library != "" {
				h = h.WithLibraries(filepath.Join(r.dir, c.library))
			}
			d, err := Discover(h, testVersion)
			testenv.Must(t, err)
			if got := d.Libraries[0].HostPath; got != r.dir+c.libraries+"/libcuda.so."+testVersion {
				t.Errorf("library %s", got)
			}
			got := map[string]string{}
			for _, f := range d.Files {
				got[f.Path] = f.HostPath
			}
			want := map[string]string{
				"/usr/bin/nvidia-smi": r.dir + c.programs + "/nvidia-smi",
				"/lib/firmware/nvidia/" + testVersion + "/gsp_ga10x.bin": r.dir + c.firmware + "/nvidia/" + testVersion +
					"/gsp_ga10x.bin",
				"/run/nvidia-persistenced/socket": r.dir + c.sockets + "/nvidia-persistenced/socket",
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("files (-want +got):\n%s", diff)
			}
		})
	}
}

// The directories beside the library that NVML was found in have the driver's files only if they can be an installation
// of its own, below the driver's root.
func TestDirectoriesBesideTheLibrary(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		library string // beside or below the directory `root`
		want    bool
	}{
		"lib":                {"root/opt/x/lib", true},
		"lib64":              {"root/opt/x/lib64", true},
		"another name":       {"root/opt/x/libraries", false},
		"not below the root": {"elsewhere/lib64", false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newTree(t)
			base := r.dir
			r.dir = filepath.Join(base, "root")
			r.core("/usr/lib64", testVersion)
			library := filepath.Join(base, c.library)
			for _, dir := range []string{"/opt/x", filepath.Join(base, "elsewhere")} { // both are below the root
				r.file(dir+"/share/OpenCL/vendors/nvidia.icd", "", 0o644)
			}
			d, err := Discover(r.host().WithLibraries(library), testVersion)
			testenv.Must(t, err)
			found := slices.ContainsFunc(d.Files, func(f File) bool { return f.Path == "/etc/OpenCL/vendors/nvidia.icd" })
			if found != c.want {
				t.Errorf("files %v", d.Files)
			}
		})
	}
}

// A file is missing if its sibling was found and the capabilities need it.
func TestMissingFilesAreThoseWithSiblings(t *testing.T) {
	t.Parallel()
	r := newTree(t)
	r.core("/usr/lib64", testVersion)
	r.library("/usr/lib64/libnvidia-opencl.so." + testVersion)
	r.file("/usr/bin/nvidia-cuda-mps-server", "", 0o755)
	r.file("/usr/bin/nvidia-imex", "", 0o755)
	d := r.discover(testVersion)
	for c, want := range map[Capabilities]map[string]string{
		All: {
			"libnvidia-ptxjitcompiler": "libcuda", "nvidia-smi": "libnvidia-ml", "OpenCL/vendors/nvidia.icd": "libnvidia-opencl",
			"nvidia-cuda-mps-control": "nvidia-cuda-mps-server", "nvidia/" + testVersion + "/gsp*.bin": "libcuda",
		},
		Utility: {"nvidia-smi": "libnvidia-ml", "nvidia/" + testVersion + "/gsp*.bin": "libcuda"},
	} {
		got := map[string]string{}
		for _, f := range d.Explain(c) {
			if f.Missing != "" {
				got[f.Name] = f.Missing
			}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("for %s (-want +got):\n%s", c, diff)
		}
	}
}

// docker run -v makes a directory where a file is not there.
func TestAFileThatCannotBeUsedIsMissing(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		make func(*tree)
		want string // the note; empty if it is not missing
	}{
		"a directory":               {func(r *tree) { r.file("/usr/bin/nvidia-smi/x", "", 0o644) }, "a directory, not used"},
		"a file without permission": {func(r *tree) { r.file("/usr/bin/nvidia-smi", "", 0o644) }, "not executable"},
		"a directory beside the file": {func(r *tree) {
			r.file("/usr/local/bin/nvidia-smi/x", "", 0o644)
			r.file("/usr/bin/nvidia-smi", "", 0o755)
		}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newTree(t)
			r.core("/usr/lib64", testVersion)
			c.make(r)
			got := ""
			for _, f := range r.discover(testVersion).Findings {
				if f.Name == "nvidia-smi" && f.Missing != "" {
					got = f.Note
				}
			}
			if got != c.want {
				t.Errorf("missing: %q, want %q", got, c.want)
			}
		})
	}
}

func TestIsRoot(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		files []string
		want  bool
	}{
		"a driver container":              {[]string{"/etc/os-release", "/usr/bin/nvidia-smi"}, true},
		"a directory in place of a file":  {[]string{"/etc/os-release", "/usr/bin/nvidia-smi/x"}, false},
		"only libraries, as on Talos":     {[]string{"/etc/ld.so.cache", "/usr/lib/libcuda.so.1"}, false},
		"a directory of files, as on COS": {[]string{"/bin/nvidia-smi", "/lib64/libcuda.so.1"}, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newTree(t)
			for _, f := range c.files {
				r.file(f, "", 0o755)
			}
			if got := IsRoot(r.dir); got != c.want {
				t.Errorf("got %v", got)
			}
		})
	}
}
