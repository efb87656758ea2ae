package drivers

import (
	"path/filepath"
	"slices"
	"testing"

	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/specdiff"
)

// realFiles are the intended differences that only real files show, or that come from the simulated part of the node.
var realFiles = []specdiff.Difference{
	{
		Only: specdiff.Theirs, Kind: "file", Pattern: `/usr/lib/x86_64-linux-gnu/nvidia/\w+/libnvidia-ml\.so\.[\d.]+`,
		What:   "the real libnvidia-ml",
		Reason: "The node has the simulated one too, and that is used. nvidia-ctk takes all files of that name.",
	},
	{
		Only: specdiff.Theirs, Kind: "link", Pattern: `/usr/lib/x86_64-linux-gnu/nvidia/\w+/libnvidia-ml\.so(\.1)? -> .*`,
		What: "links to the real libnvidia-ml", Reason: "See there.",
	},
	{
		Only: specdiff.Theirs, Kind: "file", Pattern: `/usr/sbin/nvidia-cuda-mps-server`,
		What: "nvidia-cuda-mps-server in /usr/sbin", Reason: "All programs are in /usr/bin of the container.",
	},
	{
		Only: specdiff.Ours, Kind: "file", Pattern: `/usr/sbin/nvidia-cuda-mps-server as /usr/bin/nvidia-cuda-mps-server`,
		What: "nvidia-cuda-mps-server in /usr/bin", Reason: "See there.",
	},
	{
		Only: specdiff.Ours, Kind: "file", Pattern: `/usr/lib/nvidia/\w+/libglxserver_nvidia\.so\.[\d.]+ as .*`,
		What: "libglxserver_nvidia", Reason: "nvidia-ctk does not search the directory in which Debian has it.",
	},
	{
		Only: specdiff.Ours, Kind: "link", Pattern: `.*/libglxserver_nvidia\.so -> libglxserver_nvidia\.so\.[\d.]+`,
		What: "its link", Reason: "See there.",
	},
	{
		Only: specdiff.Ours, Kind: "link", Pattern: `.*/libnvidia-vulkan-producer\.so -> libnvidia-vulkan-producer\.so\..*`,
		What:   "the link to libnvidia-vulkan-producer",
		Reason: "Until 525 the library's SONAME has the version, so nvidia-ctk makes no link.",
	},
}

// testPeer compares the spec with that of nvidia-ctk on the same node. Both have it as their root directory.
func (n *node) testPeer(t *testing.T) {
	programs := []string{
		shared.Peer(t, "nvidia-ctk"), shared.Program(t, "gpu-cdi-plugin"), shared.Program(t, "prestart-hook"),
	}
	bin := filepath.Join(n.root, "usr/bin")
	proc.Must(t, 0, proc.Cmd{Args: append([]string{"cp", "-t", bin}, programs...)})
	run := func(args ...string) []specdiff.Fact {
		args[0] = filepath.Join("/usr/bin", args[0])
		res := proc.Must(t, 0, proc.Cmd{Args: args, Chroot: n.root, Env: []string{"PATH=/usr/sbin:/usr/bin"}})
		return specdiff.Facts(n.root, specdiff.Parse(t, res.Stdout))
	}
	their := run("nvidia-ctk", "cdi", "generate", "--format=json")
	our := run("gpu-cdi-plugin", "--hook-path", "/usr/bin/prestart-hook", "cdi", "generate")
	used := &specdiff.Usage{Listed: slices.Concat(specdiff.Differences, realFiles)}
	used.Check(t, specdiff.Theirs, specdiff.Without(their, our))
	used.Check(t, specdiff.Ours, specdiff.Without(our, their))
}
