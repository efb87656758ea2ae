package launch

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"gpu-cdi-plugin/internal/wording"
	"gpu-cdi-plugin/manager/arguments"
)

// engine describes the command line of a container engine.
type engine struct {
	// global are the options before the subcommand, and run are those behind it.
	global, run options
	// verbs are the subcommands that run a container, and refused those whose container no lease can follow.
	verbs, refused []string
	// short are the short names of options that conflicts looks at.
	short map[string]string
	// placeholder stands for the engine's options; empty if the engine takes no run options.
	placeholder string
	// bundles means that containers are described by bundles.
	bundles bool
}

// options are the options of a command by name, without dashes. Short ones are single letters. Switches need no
// value. Values may be empty: then all that are no switches are taken to have one.
type options struct{ switches, values []string }

var (
	containerVerbs   = []string{"run", "container run"}
	containerRefused = []string{"create", "container create"}
	containerShort   = map[string]string{"a": "attach", "d": "detach", "e": "env", "v": "volume"}
	// apptainerLike are Apptainer 1.5 and, with the options of the last two lines, SingularityCE 4
	// (cmd/internal/cli/apptainer.go and action_flags.go). Their options for containers are the same for all verbs.
	apptainerLike = engine{
		global: options{
			switches: strings.Fields("build-config debug d help h nocolor quiet q silent s verbose v version"),
			values:   strings.Fields("config c"),
		},
		run: options{switches: strings.Fields(`allow-setuid boot cleanenv e compat contain c containall C
			disable-cache docker-login fakeroot f help h ignore-fakeroot-command ignore-subuid ignore-userns
			intel-hpu ipc i keep-privs net n no-eval no-https nohttps no-home no-init no-nv no-privs no-rocm
			no-umask nv nvccli oom-kill-disable passphrase pid p rocm syos underlay unsquash userns u uts
			vm vm-err writable w writable-tmpfs
			keep-layers no-compat no-oci no-pid no-setgroups no-tmp-sandbox oci proot-disable sif-fuse
			tmp-sandbox`)},
		verbs:   []string{"run", "exec", "shell", "test"},
		refused: []string{"instance start", "instance run"},
	}
	// runtimeLike are runc 1.4 (main.go, run.go) and crun 1.24 (src/crun.c, src/run.c).
	runtimeLike = engine{
		global: options{
			switches: strings.Fields("debug systemd-cgroup help h version v"),
			values:   strings.Fields("cgroup-manager criu log log-format log-level root rootless"),
		},
		run:   options{switches: strings.Fields(`detach d keep no-new-keyring no-pivot no-subreaper help h`)},
		verbs: []string{"run"}, refused: []string{"create"},
		short: map[string]string{"b": "bundle", "d": "detach", "f": "config"}, bundles: true,
	}
)

// engines are the known engines by the name of their program. The tables have the options of all versions that were
// read: a name that an engine does not know makes no difference, because it refuses the command.
var engines = map[string]*engine{
	"podman": { // 4.3 and 5.8: cmd/podman/root.go, cmd/podman/common/create.go and netflags.go
		global: options{
			switches: strings.Fields("debug D help noout remote r syslog trace transient-store version v"),
			values: strings.Fields(`cdi-spec-dir cgroup-manager config conmon connection c context cpu-profile
				db-backend default-mounts-file events-backend hooks-dir host H identity imagestore log-level
				max-workers memory-profile module namespace network-backend network-cmd-path network-config-dir out
				pull-option registries-conf root runroot runtime runtime-flag ssh storage-driver storage-opt
				tls-ca tls-cert tls-key tmpdir url volumepath`),
		},
		run: options{switches: strings.Fields(`detach d disable-content-trust env-host help http-proxy init
			interactive i no-healthcheck no-hostname no-hosts noout oom-kill-disable passwd privileged publish-all P
			quiet q read-only read-only-tmpfs replace rm rmi rootfs sig-proxy syslog tls-verify trace
			transient-store tty t unsetenv-all`)},
		verbs: containerVerbs, refused: containerRefused, short: containerShort,
		placeholder: "{podman}",
	},
	"docker": { // 29.9: cli/flags/options.go, cmd/docker/docker.go, cli/command/container/opts.go, run.go
		global: options{
			switches: strings.Fields("cloud debug D help h tls tlsverify version v"),
			values:   strings.Fields("config context c host H log-level l tlscacert tlscert tlskey"),
		},
		run: options{switches: strings.Fields(`detach d disable-content-trust help init interactive i no-healthcheck
			oom-kill-disable privileged publish-all P quiet q read-only rm sig-proxy tty t use-api-socket`)},
		verbs: containerVerbs, refused: containerRefused, short: containerShort,
		placeholder: "{docker}",
	},
	"nerdctl": { // 2.3: cmd/nerdctl/main.go, cmd/nerdctl/container/container_run.go
		global: options{
			switches: strings.Fields(`debug debug-full experimental help h insecure-registry kube-hide-dupe
				selinux-enabled version v`),
			values: strings.Fields(`address a bridge-ip cdi-spec-dirs cgroup-manager cni-netconfpath cni-path data-root
				H host host-gateway-ip hosts-dir n namespace snapshotter storage-driver userns-remap`),
		},
		run: options{switches: strings.Fields(`debug debug-full detach d experimental help init insecure-registry
			interactive i kube-hide-dupe no-healthcheck oom-kill-disable privileged quiet q read-only rm rootfs
			selinux-enabled sig-proxy tty t`)},
		verbs: containerVerbs, refused: containerRefused, short: containerShort,
		placeholder: "{nerdctl}",
	},
	"runc":        &runtimeLike,
	"crun":        &runtimeLike,
	"apptainer":   &apptainerLike,
	"singularity": &apptainerLike,
}

// instead has what to write in place of programs that run containers but take no options for devices.
var instead = map[string]string{
	"podman-compose": composing,
	"docker-compose": composing,
}

const composing = "use podman run or docker run, or pass {cdi} or {uuids} in an argument that your file reads"

// behindVerb returns the index of the first argument behind the subcommand.
func (e *engine) behindVerb(name string, args []string) (int, error) {
	verb := ""
	for i := 1; i < len(args); {
		if isOption(args[i]) {
			_, width, err := e.global.read(args[i:])
			if err != nil {
				return 0, fmt.Errorf("%s: %w", name, err)
			}
			i += width
			continue
		}
		verb = strings.TrimPrefix(verb+" "+args[i], " ")
		i++
		switch {
		case slices.Contains(e.verbs, verb):
			return i, nil
		case slices.Contains(e.refused, verb):
			return 0, e.cannotFollow(name + " " + verb)
		case slices.ContainsFunc(slices.Concat(e.verbs, e.refused), func(v string) bool {
			return strings.HasPrefix(v, verb+" ")
		}):
			continue
		}
		break
	}
	what := fmt.Sprintf("%s %s is no command", name, wording.Shorten(verb, maxShown))
	if verb == "" {
		what = name + " is called without a command"
	}
	return 0, fmt.Errorf("%s that gets devices: use %s %s, or say where the devices belong with a placeholder (%s)",
		what, name, strings.Join(e.verbs, ", "), e.placeholders())
}

// placeholders are those that suit the engine.
func (e *engine) placeholders() string {
	if e.placeholder == "" {
		return "{cdi} or {uuids}"
	}
	return e.placeholder + ", {cdi} or {uuids}"
}

// isOption reports whether an argument is an option, and not a subcommand or image.
func isOption(arg string) bool { return len(arg) > 1 && arg[0] == '-' }

// option is an option of a command line. A switch without a value has the value "true".
type option struct{ name, value string }

func (o option) String() string {
	dashes := "--"
	if len(o.name) == 1 {
		dashes = "-"
	}
	return dashes + o.name + "=" + wording.Shorten(o.value, maxShown)
}

// read returns the options that begin the arguments and how many arguments they take: all of one argument, as in -it,
// and the value of the last. It reads them like pflag, which these engines use. It returns an error if it is not known
// whether an option has a value; then --name=value can be read.
func (o options) read(args []string) (found []option, width int, err error) {
	text, long := strings.CutPrefix(args[0], "--")
	if long {
		name, value, has := strings.Cut(text, "=")
		switch {
		case has:
			return []option{{name, value}}, 1, nil
		case slices.Contains(o.switches, name):
			return []option{{name, "true"}}, 1, nil
		}
		value, width, err = o.valueOf("--"+name, name, args)
		return []option{{name, value}}, width, err
	}
	for text = text[1:]; text != ""; text = text[1:] {
		name, rest := text[:1], text[1:]
		value, has := strings.CutPrefix(rest, "=")
		switch {
		case has && value != "":
			return append(found, option{name, value}), 1, nil
		case slices.Contains(o.switches, name):
			found = append(found, option{name, "true"})
			continue
		case rest != "":
			return append(found, option{name, rest}), 1, nil
		}
		value, width, err = o.valueOf("-"+name, name, args)
		return append(found, option{name, value}), width, err
	}
	return found, 1, nil
}

// valueOf returns the value of an option that has it in the next argument.
func (o options) valueOf(arg, name string, args []string) (value string, width int, err error) {
	if len(o.values) > 0 && !slices.Contains(o.values, name) {
		return "", 0, fmt.Errorf("unknown option %s before the command: write its value as %s=VALUE, or say where the "+
			"devices belong with a placeholder such as {podman}", wording.Shorten(arg, maxShown),
			wording.Shorten(arg, maxShown))
	}
	if len(args) < 2 {
		return "", 1, nil
	}
	return args[1], 2, nil
}

// given returns the options that begin the arguments behind the subcommand, with their long names.
func (e *engine) given(args []string) (list []option, err error) {
	for len(args) > 0 && args[0] != "--" && isOption(args[0]) {
		found, width, err := e.run.read(args)
		if err != nil {
			return nil, err
		}
		for _, o := range found {
			list = append(list, option{cmp.Or(e.short[o.name], o.name), o.value})
		}
		args = args[width:]
	}
	return list, nil
}

// ErrCannotFollow means that the lease cannot follow the container, which may start later or again.
var ErrCannotFollow = errors.New("the lease cannot follow the container, which may start later or again")

func (e *engine) cannotFollow(what string) error {
	return fmt.Errorf("%s: %w; a placeholder (%s) allows it", what, ErrCannotFollow, e.placeholders())
}

// checkRestart returns an error that wraps ErrCannotFollow if the engine may start the container again.
func (e *engine) checkRestart(name string, given []option) error {
	for _, o := range given {
		if o.name == "restart" && !slices.Contains([]string{"", "no"}, o.value) {
			return e.cannotFollow(name + " " + o.String())
		}
	}
	return nil
}

// isTrue reports whether pflag reads a value as true, or refuses it.
func isTrue(value string) bool {
	return !slices.Contains([]string{"0", "f", "F", "false", "FALSE", "False"}, value)
}

// bundle returns the plan for a runtime whose container is described by a bundle.
func (l lease) bundle(name string, args []string, given []option) (Plan, error) {
	dir := "."
	for _, o := range given {
		switch o.name {
		case "bundle":
			dir = o.value
		case "config":
			return Plan{}, fmt.Errorf("%s: the devices belong into the config.json of the bundle: leave out %s", name, o)
		}
	}
	return Plan{Args: args, Bundle: dir}, nil
}

// container returns the plan for an engine that takes run options. They are inserted at index i, behind the
// subcommand, where no option of the user can be taken for a part of them.
//
// When the time of a lease is over, podman itself is ended: with SIGTERM, which it passes on, and then with SIGKILL,
// which leaves the container. The option --timeout has conmon end that. podman has it since 3.2, and CDI since 4.1.
func (l lease) container(name string, args []string, i int, given []option, notes []string) (Plan, error) {
	own, err := arguments.For(name, l.RunOptions)
	if err != nil {
		return Plan{}, err
	}
	timed := slices.ContainsFunc(given, func(o option) bool { return o.name == "timeout" })
	if name == "podman" && l.Limit > 0 && !timed {
		own = append(own, "--timeout="+strconv.FormatInt(int64((l.Limit+time.Second-1)/time.Second), 10))
	}
	if len(l.CDIDevices)+len(l.Devices) == 0 {
		notes = append(notes, "the plugin gave no CDI names and no device nodes, so "+name+
			" gives the container no device by itself")
	}
	return Plan{Args: slices.Insert(args, i, own...), Notes: notes}, nil
}

// apptainerPrefix begins the names of variables that Apptainer sets in the container without the prefix, in place of
// the caller's.
const apptainerPrefix = "APPTAINERENV_"

// apptainer returns the plan for Apptainer and SingularityCE. Both have --nv, which gives a container all NVIDIA GPUs
// of the host, and variables that set the container's, also with --cleanenv. CDI names are no alternative by default:
// Apptainer takes them since 1.5 and SingularityCE only with --oci, Apptainer runs no hooks, so that it needs specs
// that were made with --no-hook, and without --contain a container has all of the host's /dev anyway.
func (l lease) apptainer(name string, args []string, i int, notes []string) (Plan, error) {
	env, more, err := l.env()
	if err != nil {
		return Plan{}, err
	}
	prefixes := []string{apptainerPrefix}
	if name == "singularity" { // which may be a link to Apptainer
		prefixes = append(prefixes, "SINGULARITYENV_")
	}
	p := Plan{Args: slices.Insert(args, i, "--nv"), Notes: append(notes, more...)}
	for _, variable := range env {
		for _, prefix := range prefixes {
			p.Env = append(p.Env, prefix+variable)
		}
	}
	p.Notes = append(p.Notes, fmt.Sprintf("%s gives the container all GPUs of the host, and only %s says which are "+
		"leased; Apptainer 1.5 gives only these with --contain --device {cdi}, if the CDI specs were made with --no-hook",
		name, visibleDevices))
	return p, nil
}
