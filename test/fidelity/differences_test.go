package fidelity

import (
	"fmt"
	"regexp"
	"strings"
)

// side is who of the two has something that the other has not.
type side string

const (
	theirs side = "nvidia-ctk"
	ours   side = "gpu-cdi-plugin"
)

// difference is a way in which the two specs are meant to differ. specs/README.md lists exactly these.
type difference struct {
	only side
	// kind is the kind of the facts, pattern matches them whole.
	kind, pattern string
	// what and reason are for people.
	what, reason string
}

func (d *difference) covers(s side, f fact) bool {
	return d.only == s && d.kind == f.kind && regexp.MustCompile("^(?:"+d.pattern+")$").MatchString(f.thing)
}

// differences are all of them.
var differences = []difference{
	{
		theirs, "device number", `/dev/.* is \d+:\d+`, "the numbers of device nodes",
		"The majors of nvidia-uvm and nvidia-caps are given out anew at every boot, and a spec that holds an old one gives " +
			"the container another driver's device. Engines read the number from the host's node when a container is made.",
	},
	{
		theirs, "permissions", "rwm", "the right to make device nodes (`rwm`)",
		"The engine makes the nodes; nothing in the container has to.",
	},
	{ours, "permissions", "rw", "device permissions `rw`", "See `rwm`."},
	{
		theirs, "mode", `/dev/nvidia.* is 0\d+`, "the mode of the driver's nodes",
		"Engines make a node with the mode that the host's node has when a container is made.",
	},
	{
		theirs, "mode", `/dev/dri/.* is 0660`, "mode 0660 of the nodes in /dev/dri",
		"It shuts out users that are in neither of the host's groups video and render. In a container the device cgroup " +
			"decides who may use a device, and a container has only those that it was given.",
	},
	{ours, "mode", `/dev/dri/.* is 0666`, "mode 0666 of the nodes in /dev/dri", "See mode 0660."},
	{
		theirs, "owner", `/dev/dri/.*`, "the owner of the nodes in /dev/dri",
		"The host's numbers of the groups video and render mean nothing in an image that numbers its groups otherwise.",
	},
	{
		theirs, "group", `\d+`, "the groups that own the nodes in /dev/dri, as additional groups",
		"Our nodes are open to all users of the container, who need no group then.",
	},
	{
		theirs, "cdiVersion", `0\.7\.0`, "cdiVersion 0.7.0",
		"Additional groups need it. Without them 0.5.0 is enough, which older engines read as well.",
	},
	{ours, "cdiVersion", `0\.5\.0`, "cdiVersion 0.5.0", "See cdiVersion 0.7.0."},
	{
		theirs, "variable", "NVIDIA_CTK_LIBCUDA_DIR=.*", "the variable `NVIDIA_CTK_LIBCUDA_DIR`",
		"It tells NVIDIA's other programs where libcuda is. Our hook has it among its arguments.",
	},
	{
		theirs, "hook", "nvidia-cdi-hook .*", "a hook each for links, CUDA compatibility, the loader cache, parameters and EGL",
		"One hook does all of that in one process.",
	},
	{ours, "hook", "prestart-hook create-container", "the hook `prestart-hook create-container`", "See the other hooks."},
	{
		ours, "link", `/.*/libnvidia-egl-\w+\.so\.1 -> libnvidia-egl-\w+\.so\.[\d.]+`,
		"links by SONAME to the EGL platform libraries",
		"nvidia-ctk makes such links for libraries that have the driver's version. For others it leaves that to ldconfig, " +
			"which it runs in the container and we do not.",
	},
}

// table is the differences for specs/README.md.
func table() string {
	var b strings.Builder
	b.WriteString("| only in | what | why |\n|---|---|---|\n")
	for _, d := range differences {
		fmt.Fprintf(&b, "| %s | %s | %s |\n", d.only, d.what, d.reason)
	}
	return b.String()
}
