package check

import (
	"fmt"
	"regexp"
	"strings"

	"gpu-cdi-plugin/internal/wording"
)

const (
	startWithGPU = "start the container with --device nvidia.com/gpu=all, or request nvidia.com/gpu in the limits of " +
		"its pod; the variable NVIDIA_VISIBLE_DEVICES gives nothing"
	askDoctor = "gpu-cdi-plugin doctor on the host says what is wrong there"
)

// gpuNode matches the device nodes of GPUs.
var gpuNode = regexp.MustCompile(`^/dev/nvidia[0-9]+$`)

// problems compares what the container has with what it was given and needs.
func (r *Report) problems() []Problem {
	gpus := 0
	for _, n := range r.Nodes {
		if gpuNode.MatchString(n.Path) {
			gpus++
		}
	}
	hasLibraries := len(r.Libraries) > 0
	switch {
	case gpus == 0 && !hasLibraries && len(r.Devices) == 0:
		problem := "it was given no GPU: no device node and no library of the driver is here"
		return []Problem{{"container", problem, startWithGPU}}
	case gpus == 0:
		problem := "no device node of a GPU is here, although the container was given " + r.given()
		fix := "start the container again, and give the GPU by its CDI name; " + askDoctor
		return append(r.libraryProblems(), Problem{"/dev", problem, fix})
	}
	list := r.nodeProblems()
	if given := r.givenGPUs(); given > gpus {
		problem := fmt.Sprintf("the container was given %d GPUs, and has the device nodes of %d", given, gpus)
		list = append(list, Problem{"/dev", problem, askDoctor})
	}
	if !hasLibraries {
		return append(list, Problem{
			"libraries", "the device nodes are here without the driver's libraries",
			"give the GPU by its CDI name (--device nvidia.com/gpu=0) and not by its device node; a volume over /usr hides " +
				"the libraries",
		})
	}
	return append(list, r.libraryProblems()...)
}

// given says what shows that the container was given a GPU.
func (r *Report) given() string {
	if len(r.Devices) > 0 {
		return fmt.Sprintf("%s (%s)", wording.Count(len(r.Devices), "device"), r.Devices[0].UUID)
	}
	return "the driver's libraries"
}

// givenGPUs returns the number of GPUs that the descriptors name; a MIG device counts as its GPU.
func (r *Report) givenGPUs() int {
	gpus := map[string]bool{}
	for _, d := range r.Devices {
		if d.Parent != "" {
			gpus[d.Parent] = true
		} else if d.UUID != "" {
			gpus[d.UUID] = true
		}
	}
	return len(gpus)
}

// nodeProblems lists the device nodes that cannot be opened, and those without which CUDA does not start.
func (r *Report) nodeProblems() []Problem {
	var list []Problem
	has := map[string]bool{}
	for _, n := range r.Nodes {
		has[n.Path] = true
		if n.Error == "" {
			continue
		}
		fix := askDoctor
		switch {
		case strings.Contains(n.Error, "EPERM"):
			fix = "give the device by its CDI name; if it worked before, systemctl daemon-reload has taken it away: start the " +
				"container again, and see dev-char in the documentation of gpu-cdi-plugin doctor"
		case strings.Contains(n.Error, "EACCES"):
			fix = "run as a user or group that may open it; with SELinux: setsebool -P container_use_devices on, on the host"
		case strings.Contains(n.Error, "ENXIO"), strings.Contains(n.Error, "ENODEV"):
			fix = "on the host: modprobe nvidia && gpu-cdi-plugin device make-nodes; for a GPU that is gone dmesg has the reason"
		}
		list = append(list, Problem{n.Path, n.Error, fix})
	}
	for _, name := range []string{"/dev/nvidiactl", "/dev/nvidia-uvm"} {
		if !has[name] {
			list = append(list, Problem{
				name, "the device node is missing, without which CUDA does not start",
				"on the host: gpu-cdi-plugin device make-nodes, then cdi generate --write; then start the container again",
			})
		}
	}
	return list
}

// libraryProblems lists what the loader does not find, and versions that disagree.
func (r *Report) libraryProblems() []Problem {
	var lost, other []string
	found := map[string]bool{}
	for _, l := range r.Libraries {
		switch {
		case l.Found == "":
			lost = append(lost, l.Name)
		case l.Given != "" && !l.same && !isCompat(l.Found):
			other = append(other, l.Found)
		}
		found[l.Name] = l.Found != "" || l.Given != ""
	}
	var list []Problem
	if len(lost) > 0 {
		problem := fmt.Sprintf("the loader does not find %d of %d libraries, such as %s",
			len(lost), len(r.Libraries), lost[0])
		list = append(list, Problem{"/etc/ld.so.cache", problem, "the hook of the spec did not run, or the file was " +
			"replaced: see that the engine runs createContainer hooks and that no volume is over /etc"})
	}
	for _, file := range other {
		list = append(list, Problem{
			file, "the loader finds this library in place of the driver's",
			"remove it from the image: an image must not have libraries of the driver",
		})
	}
	for _, name := range needed {
		if len(r.Libraries) > 0 && !found[name] {
			list = append(list, Problem{name, "the library is missing", "make the spec with the capabilities that the program " +
				"needs, such as compute,utility"})
		}
	}
	if r.Driver != "" && r.CUDA != "" && r.Driver != r.CUDA && !r.usesCompat() {
		problem := fmt.Sprintf("libcuda has version %s, and the kernel's driver %s", r.CUDA, r.Driver)
		list = append(list, Problem{"libcuda.so.1", problem, "on the host: gpu-cdi-plugin cdi generate --write; then make " +
			"the container again"})
	}
	return list
}

// isCompat reports whether a library is one of CUDA's forward compatibility, which images bring with them.
func isCompat(file string) bool { return strings.Contains(file, "/compat/") }

func (r *Report) usesCompat() bool {
	for _, l := range r.Libraries {
		if l.Name == needed[0] && isCompat(l.Found) {
			return true
		}
	}
	return false
}
