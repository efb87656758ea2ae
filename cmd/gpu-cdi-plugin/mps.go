package main

import (
	"fmt"
	"path/filepath"

	"github.com/spf13/cobra"

	"gpu-cdi-plugin/agent"
	"gpu-cdi-plugin/agent/mps"
	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/internal/host"
)

func (a *app) mpsCommand() *cobra.Command {
	var uuid, mount string
	var all bool
	cmd := &cobra.Command{
		Use:   "mps {--gpu UUID | --all}",
		Short: "Run the MPS control daemon of a shared GPU",
		Long: `Runs the driver's nvidia-cuda-mps-control for a GPU that serve shares by MPS. It waits until serve shares the
GPU, and gives the daemon the limits in the descriptor that serve has written to --state-dir, also when they change. It
ends with the daemon, and the daemon ends with it. When the GPU is no longer shared, the daemon ends as soon as its last
client has ended. It does not open the NVIDIA driver.

It needs the same --runtime-dir, --state-dir and --driver-root as serve, the PID namespace of the host, and a /dev/shm
that the containers of the GPU get too. On a host gpu-cdi-mps@.service runs it, and confines it. Before that
gpu-cdi-mps-shm@.service makes the GPU's directories and mounts that shared memory, with --mount. It follows no links.

With --all it runs the daemons of all GPUs that are shared, and restarts those that have ended: for the pods of the
chart's MPS DaemonSet.

The control program, its server and their libraries must belong to root, with all directories above them. Otherwise they
are not run, unless --insecure-paths allows it.`,
		Example: `  gpu-cdi-plugin mps --gpu GPU-8f6c3a1e-0000-4000-8000-000000000001
  gpu-cdi-plugin mps --gpu GPU-8f6c3a1e-0000-4000-8000-000000000001 --mount size=512m,nr_inodes=128k
  gpu-cdi-plugin mps --all`,
		Annotations: cli.Statuses(cli.OK, cli.Failure, cli.Usage, cli.NoDriver, cli.Locked),
		RunE: func(cmd *cobra.Command, _ []string) error {
			o, err := a.mpsOptions()
			if err != nil {
				return err
			}
			switch {
			case mount != "":
				return mps.Prepare(o, uuid, mount)
			case all:
				return mps.RunAll(cmd.Context(), o)
			}
			return mps.Run(cmd.Context(), o, uuid)
		},
	}
	cmd.Flags().StringVar(&uuid, "gpu", "", "the GPU's `UUID`")
	cmd.Flags().BoolVar(&all, "all", false, "all GPUs that are shared by MPS")
	cmd.Flags().StringVar(&mount, "mount", "",
		"mount the GPU's shared memory, a tmpfs with these `OPTIONS` such as size=512m, and do nothing else")
	cmd.MarkFlagsOneRequired("gpu", "all")
	cmd.MarkFlagsMutuallyExclusive("gpu", "all")
	cmd.MarkFlagsMutuallyExclusive("mount", "all")
	_ = cmd.RegisterFlagCompletionFunc("gpu", cobra.NoFileCompletions)
	_ = cmd.RegisterFlagCompletionFunc("mount", cobra.NoFileCompletions)
	for _, option := range []string{"runtime-dir", "state-dir"} {
		cmd.Flags().AddFlag(a.ServiceFlags.Lookup(option))
	}
	return cmd
}

func (a *app) mpsOptions() (mps.Options, error) {
	h, err := a.host()
	if err != nil {
		return mps.Options{}, err
	}
	return mps.Options{
		Dir: agent.MPSDir(a.config), Descriptors: agent.DescriptorDir(a.config),
		Program: func() (mps.Program, error) { return findMPS(h) },
		Check:   a.CheckPath, Output: a.Stderr, Log: a.Log,
	}, nil
}

// findMPS finds the driver's MPS control program. It does not open the driver, since that would prevent resets.
func findMPS(h host.Host) (mps.Program, error) {
	d, file, err := agent.FindProgram(h, mps.ControlProgram)
	if err != nil {
		return mps.Program{}, err
	}
	root := h.DriverRoot()
	if file == nil {
		return mps.Program{}, fmt.Errorf("the driver in %s has no %s: install its compute utilities, "+
			"or share the GPUs by time-slicing", root, mps.ControlProgram)
	}
	p := mps.Program{Path: file.HostPath}
	if root == "/" {
		return p, nil // the loader finds the libraries by itself
	}
	p.Root, p.Libraries = root, map[string]string{}
	for _, l := range d.Libraries {
		p.Libraries[filepath.Base(l.Path)] = l.HostPath
		if l.SONAME != "" {
			p.Libraries[l.SONAME] = l.HostPath
		}
	}
	return p, nil
}
