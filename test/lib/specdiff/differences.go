package specdiff

import (
	"regexp"
	"sync"
	"testing"
)

// Side is the program whose spec has something that the other's lacks.
type Side string

// The two programs.
const (
	Theirs Side = "nvidia-ctk"
	Ours   Side = "gpu-cdi-plugin"
)

// Difference is an intended difference between the two specs. specs/README.md lists all of them.
type Difference struct {
	Only Side
	// Kind is the kind of the facts, Pattern a regular expression for the whole fact.
	Kind, Pattern string
	// What and Reason are the text in specs/README.md.
	What, Reason string
}

func (d *Difference) covers(s Side, f Fact) bool {
	return d.Only == s && d.Kind == f.kind && regexp.MustCompile("^(?:"+d.Pattern+")$").MatchString(f.thing)
}

// Differences are the intended differences on every host.
var Differences = []Difference{
	{
		Theirs, "device number", `/dev/.* is \d+:\d+`, "the numbers of device nodes",
		"The kernel assigns the majors of nvidia-uvm and nvidia-caps at every boot. With an old one a container gets " +
			"another driver's device. Without one engines read the number from the host's node when they create a " +
			"container.",
	},
	{
		Theirs, "permissions", "rwm", "the right to make device nodes (`rwm`)",
		"The engine makes the nodes; a container does not need to.",
	},
	{Ours, "permissions", "rw", "device permissions `rw`", "See `rwm`."},
	{
		Theirs, "mode", `/dev/nvidia.* is 0\d+`, "the mode of the driver's nodes",
		"Engines give a node the mode that the host's node has when they create a container.",
	},
	{
		Theirs, "mode", `/dev/dri/.* is 0660`, "mode 0660 of the nodes in /dev/dri",
		"It excludes users that are in neither of the host's groups video and render. In a container the device " +
			"cgroup grants access, and only to the devices that the container has.",
	},
	{Ours, "mode", `/dev/dri/.* is 0666`, "mode 0666 of the nodes in /dev/dri", "See mode 0660."},
	{
		Theirs, "owner", `/dev/dri/.*`, "the owner of the nodes in /dev/dri",
		"An image can have other numbers for the groups video and render than the host.",
	},
	{
		Theirs, "group", `\d+`, "the groups that own the nodes in /dev/dri, as additional groups",
		"With mode 0666 the users of a container need no group.",
	},
	{
		Theirs, "cdiVersion", `0\.7\.0`, "cdiVersion 0.7.0",
		"Additional groups need it. Without them 0.5.0 is enough, which older engines read too.",
	},
	{Ours, "cdiVersion", `0\.5\.0`, "cdiVersion 0.5.0", "See cdiVersion 0.7.0."},
	{
		Theirs, "variable", "NVIDIA_CTK_LIBCUDA_DIR=.*", "the variable `NVIDIA_CTK_LIBCUDA_DIR`",
		"NVIDIA's other programs find libcuda by it. Our hook has the path in its arguments.",
	},
	{
		Theirs, "file", "/dev/null as /var/run/nvidia-container-devices/void",
		"the mount `/var/run/nvidia-container-devices/void`",
		"It keeps NVIDIA's runtime from adding GPUs that the container's other mounts in that directory name. " +
			"NVIDIA's device plugin makes such mounts with the strategy volume-mounts, which ours does not have.",
	},
	{Theirs, "mount options", "bind,nodev,nosuid,ro", "its mount options", "See that mount."},
	{
		Theirs, "hook", "nvidia-cdi-hook .*",
		"one hook each for links, CUDA compatibility, the loader cache, parameters and EGL",
		"One hook does all of this in one process.",
	},
	{
		Ours, "hook", "prestart-hook create-container",
		"the hook `prestart-hook create-container`", "See the other hooks.",
	},
	{
		Ours, "link", `/.*/libnvidia-egl-\w+\.so\.1 -> libnvidia-egl-\w+\.so\.[\d.]+`,
		"links by SONAME to the EGL platform libraries",
		"nvidia-ctk makes such links for libraries with the driver's version. For the others it runs ldconfig in the " +
			"container, which our hook does not.",
	},
}

// Usage records which of the listed differences were seen.
type Usage struct {
	Listed []Difference

	mu   sync.Mutex
	seen map[int]bool
}

// Check reports the facts that only one side has and no listed difference covers.
func (u *Usage) Check(t testing.TB, s Side, facts []Fact) {
	t.Helper()
	u.mu.Lock()
	defer u.mu.Unlock()
	for _, f := range facts {
		covered := false
		for i := range u.Listed {
			if u.Listed[i].covers(s, f) {
				covered = true
				if u.seen == nil {
					u.seen = map[int]bool{}
				}
				u.seen[i] = true
			}
		}
		if !covered {
			t.Errorf("only %s has %s", s, f)
		}
	}
}

// CheckAll reports the listed differences that were not seen.
func (u *Usage) CheckAll(t testing.TB) {
	t.Helper()
	for i, d := range u.Listed {
		if !u.seen[i] {
			t.Errorf("nothing has the listed difference %q", d.What)
		}
	}
}
