package fidelity

import (
	"fmt"
	"regexp"
	"strings"
)

// side is the program whose spec has something that the other's lacks.
type side string

const (
	theirs side = "nvidia-ctk"
	ours   side = "gpu-cdi-plugin"
)

// difference is an intended difference between the two specs. specs/README.md lists all of them.
type difference struct {
	only side
	// kind is the kind of the facts, pattern a regular expression for the whole fact.
	kind, pattern string
	// what and reason are the text in specs/README.md.
	what, reason string
}

func (d *difference) covers(s side, f fact) bool {
	return d.only == s && d.kind == f.kind && regexp.MustCompile("^(?:"+d.pattern+")$").MatchString(f.thing)
}

// differences are all intended differences.
var differences = []difference{
	{
		theirs, "device number", `/dev/.* is \d+:\d+`, "the numbers of device nodes",
		"The kernel assigns the majors of nvidia-uvm and nvidia-caps at every boot. With an old one a container gets " +
			"another driver's device. Without one engines read the number from the host's node when they create a " +
			"container.",
	},
	{
		theirs, "permissions", "rwm", "the right to make device nodes (`rwm`)",
		"The engine makes the nodes; a container does not need to.",
	},
	{ours, "permissions", "rw", "device permissions `rw`", "See `rwm`."},
	{
		theirs, "mode", `/dev/nvidia.* is 0\d+`, "the mode of the driver's nodes",
		"Engines give a node the mode that the host's node has when they create a container.",
	},
	{
		theirs, "mode", `/dev/dri/.* is 0660`, "mode 0660 of the nodes in /dev/dri",
		"It excludes users that are in neither of the host's groups video and render. In a container the device " +
			"cgroup grants access, and only to the devices that the container has.",
	},
	{ours, "mode", `/dev/dri/.* is 0666`, "mode 0666 of the nodes in /dev/dri", "See mode 0660."},
	{
		theirs, "owner", `/dev/dri/.*`, "the owner of the nodes in /dev/dri",
		"An image can have other numbers for the groups video and render than the host.",
	},
	{
		theirs, "group", `\d+`, "the groups that own the nodes in /dev/dri, as additional groups",
		"With mode 0666 the users of a container need no group.",
	},
	{
		theirs, "cdiVersion", `0\.7\.0`, "cdiVersion 0.7.0",
		"Additional groups need it. Without them 0.5.0 is enough, which older engines read too.",
	},
	{ours, "cdiVersion", `0\.5\.0`, "cdiVersion 0.5.0", "See cdiVersion 0.7.0."},
	{
		theirs, "variable", "NVIDIA_CTK_LIBCUDA_DIR=.*", "the variable `NVIDIA_CTK_LIBCUDA_DIR`",
		"NVIDIA's other programs find libcuda by it. Our hook has the path in its arguments.",
	},
	{
		theirs, "file", "/dev/null as /var/run/nvidia-container-devices/void",
		"the mount `/var/run/nvidia-container-devices/void`",
		"It keeps NVIDIA's runtime from adding GPUs that the container's other mounts in that directory name. " +
			"NVIDIA's device plugin makes such mounts with the strategy volume-mounts, which ours does not have.",
	},
	{theirs, "mount options", "bind,nodev,nosuid,ro", "its mount options", "See that mount."},
	{
		theirs, "hook", "nvidia-cdi-hook .*",
		"one hook each for links, CUDA compatibility, the loader cache, parameters and EGL",
		"One hook does all of this in one process.",
	},
	{
		ours, "hook", "prestart-hook create-container",
		"the hook `prestart-hook create-container`", "See the other hooks.",
	},
	{
		ours, "link", `/.*/libnvidia-egl-\w+\.so\.1 -> libnvidia-egl-\w+\.so\.[\d.]+`,
		"links by SONAME to the EGL platform libraries",
		"nvidia-ctk makes such links for libraries with the driver's version. For the others it runs ldconfig in the " +
			"container, which our hook does not.",
	},
}

// table is the table of differences in specs/README.md.
func table() string {
	var b strings.Builder
	b.WriteString("| only in | what | why |\n|---|---|---|\n")
	for _, d := range differences {
		fmt.Fprintf(&b, "| %s | %s | %s |\n", d.only, d.what, d.reason)
	}
	return b.String()
}
