package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/internal/wording"
	"gpu-cdi-plugin/manager"
	"gpu-cdi-plugin/manager/api"
	"gpu-cdi-plugin/manager/arguments"
	"gpu-cdi-plugin/manager/model"
	"gpu-cdi-plugin/manager/pod"
)

// admitOptions are the options of admit.
type admitOptions struct {
	cli.Output
	manifest, container, bundle string
	start, quote                bool
}

func (a *app) admitCommand() *cobra.Command {
	var o admitOptions
	cmd := a.asksServe(&cobra.Command{
		Use:   "admit -f FILE",
		Short: "Give a pod its devices, and print how to start its containers with them",
		Long: `Gives the pod of a manifest, a v1.Pod in YAML or JSON, its devices. Of the manifest, only names, the
UID, limits and restart policies have an effect. Containers are started by an engine, not by admit. A pod that already
has its devices keeps them, so admit can be called again, for example before each start of a container. A pod that a
kubelet would reject is an error with the kubelet's reason and text, and nothing is placed.

With --start the plugins prepare the devices of each container for its start (PreStartContainer), in the order in which
a kubelet starts containers, and -o json and yaml have the containers' run options: variables, mounts, device nodes,
annotations and CDI names.

The formats podman, docker and nerdctl imply --start for one container, and print its run options as arguments of these
engines, for $(...). A value that a shell would split or expand is an error; with --quote the arguments are quoted for
eval "podman run $(device-manager admit --quote ...) IMAGE".

The format oci puts the run options into the config.json in --bundle, for runc and others. If the pod has several
containers, name one with --container.`,
		Example: `  device-manager admit -f pod.yaml
  podman run --rm $(device-manager admit -f pod.yaml -o podman) docker.io/library/debian nvidia-smi -L
  device-manager admit -f pod.yaml --container main -o oci --bundle /run/bundles/main
  device-manager admit -f pod.yaml --start -o json | jq '.runOptions.main.cdiDevices'`,
		RunE: func(cmd *cobra.Command, _ []string) error { return a.admit(cmd, o) },
	})
	o.AddFlags(cmd, append([]string{"table", "json", "yaml", "name", formatOCI}, arguments.Engines()...)...)
	f := cmd.Flags()
	f.StringVarP(&o.manifest, "filename", "f", "", "`file` with the manifest; - is standard input")
	f.BoolVar(&o.start, "start", false, "prepare the start of the containers, and print their run options")
	f.StringVar(&o.container, "container", "", "`name` of the only container that is prepared")
	f.BoolVar(&o.quote, "quote", false, "quote the arguments of -o podman, docker and nerdctl for a shell's eval")
	f.StringVar(&o.bundle, "bundle", "", "`directory` of the bundle for -o oci, which holds config.json")
	_ = cmd.MarkFlagRequired("filename")
	_ = cmd.MarkFlagFilename("filename", "yaml", "yml", "json")
	return cmd
}

// formatOCI is the format that changes an OCI bundle instead of printing.
const formatOCI = "oci"

// forEngine reports whether the output consists of arguments for an engine.
func (o *admitOptions) forEngine() bool { return slices.Contains(arguments.Engines(), o.Format) }

// forOne reports whether the output is for a single container.
func (o *admitOptions) forOne() bool { return o.Format == formatOCI || o.forEngine() }

// containers returns the containers to start. It returns an error if options contradict each other, or do not fit the
// pod.
func (o *admitOptions) containers(p model.Pod) ([]string, error) {
	var names []string
	for _, c := range slices.Concat(p.InitContainers, p.Containers) {
		names = append(names, c.Name)
	}
	all := strings.Join(names, ", ")
	switch {
	case (o.Format == formatOCI) != (o.bundle != ""):
		return nil, errors.New("-o oci and --bundle DIR go together")
	case o.quote && !o.forEngine():
		return nil, fmt.Errorf("--quote is for -o %s", strings.Join(arguments.Engines(), ", "))
	case o.container != "" && !o.forOne() && !o.start:
		return nil, errors.New("--container needs --start or an output format for an engine")
	case o.container != "" && !slices.Contains(names, o.container):
		return nil, fmt.Errorf("the pod has no container %q; it has %s", o.container, all)
	case o.container != "":
		return []string{o.container}, nil
	case o.forOne() && len(names) != 1:
		return nil, fmt.Errorf("-o %s is for one container: name one with --container; there are %s", o.Format, all)
	case o.forOne() || o.start:
		return names, nil
	}
	return nil, nil
}

// admitted is the result of admit as JSON.
type admitted struct {
	Pod api.Pod `json:"pod"`
	// RunOptions has the run options of the started containers, by name.
	RunOptions map[string]model.RunOptions `json:"runOptions,omitempty"`
}

func (a *app) admit(cmd *cobra.Command, o admitOptions) error {
	ctx := cmd.Context()
	manifest, err := a.readNamed(o.manifest, pod.MaxSize, pod.ErrTooLarge)
	if err != nil {
		return fmt.Errorf("read the manifest: %w", err)
	}
	parsed, err := pod.Parse(manifest)
	if err != nil {
		return fmt.Errorf("%s: %w", o.manifest, err)
	}
	starts, err := o.containers(parsed)
	if err != nil {
		return cli.With(cli.Usage, "see device-manager admit --help", err)
	}
	client := a.client()
	placed, err := client.Admit(ctx, manifest)
	if err != nil {
		return err
	}
	if err := a.startAdmitted(ctx, client, o, placed, starts); err != nil {
		return a.stillPlaced(cmd, placed, err)
	}
	return nil
}

// stillPlaced adds to an error that the pod keeps its devices. The pod is not released, since it may have been placed
// before this call, and one of its containers may run.
func (a *app) stillPlaced(cmd *cobra.Command, placed api.Pod, err error) error {
	err = a.Classify(err)
	again := "admit it again to try again, or "
	if errors.Is(err, manager.ErrBadResponse) { // the plugin's response is kept until the pod is released
		again = ""
	}
	hint := "pod " + podName(placed.Metadata) + " keeps its devices: " + again +
		"take them back with device-manager release " + wording.Quote(placed.Metadata.UID)
	if cmd.Context().Err() != nil { // the signal will be reported as the error
		a.Log.Warn(a.WithOptions(cmd, hint))
	}
	if own := cli.HintOf(err); own != "" {
		hint = own + "; " + hint
	}
	return cli.With(cli.CodeOf(err), hint, err)
}

// startAdmitted gets the run options of the containers that start, and prints the result.
func (a *app) startAdmitted(
	ctx context.Context, client *api.Client, o admitOptions, placed api.Pod, starts []string,
) error {
	result := admitted{Pod: placed}
	for _, name := range starts {
		run, err := client.Start(ctx, placed.Metadata.UID, name)
		if err != nil {
			return fmt.Errorf("start container %s of pod %s: %w", name, podName(placed.Metadata), err)
		}
		for _, conflict := range run.Conflicts {
			a.Log.Warn("container " + name + ": " + conflict)
		}
		if result.RunOptions == nil {
			result.RunOptions = map[string]model.RunOptions{}
		}
		result.RunOptions[name] = run
	}
	switch {
	case o.Format == formatOCI:
		return a.injectRunOptions(o.bundle, result.RunOptions[starts[0]])
	case o.forEngine():
		return a.printArguments(o.Format, result.RunOptions[starts[0]], o.quote)
	}
	return o.Print(a.Stdout, admittedView(result))
}

func admittedView(result admitted) cli.View {
	v := cli.View{
		Data:  result,
		Table: cli.Table{Header: []string{"CONTAINER", "RESOURCE", "DEVICES"}},
		Names: []string{result.Pod.Metadata.UID},
	}
	for _, c := range containersOf(result.Pod) {
		for _, d := range c.Devices {
			v.Table.Rows = append(v.Table.Rows, []string{c.Name, d.ResourceName, strings.Join(d.DeviceIDs, ",")})
		}
		if len(c.Devices) == 0 {
			v.Table.Rows = append(v.Table.Rows, []string{c.Name, "-", "-"})
		}
	}
	return v
}
