// Package launch turns a user's command into what is executed with leased devices. A container engine gets its own
// options for them, placeholders in the arguments are replaced, and any other command gets CUDA_VISIBLE_DEVICES. It is
// pure: it reads no file and executes nothing.
package launch

import (
	"errors"
	"fmt"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"gpu-cdi-plugin/internal/wording"
	"gpu-cdi-plugin/manager/model"
)

const (
	// visibleDevices is the variable by which CUDA chooses devices. It takes UUIDs of GPUs and of MIG devices, and
	// indexes of GPUs.
	visibleDevices = "CUDA_VISIBLE_DEVICES"
	// busOrder has CUDA count GPUs as the driver does. By default CUDA counts from the fastest GPU.
	busOrder = "CUDA_DEVICE_ORDER=PCI_BUS_ID"
)

// maxShown is how many bytes of an argument a message quotes.
const maxShown = 100

// Plan is what to execute.
type Plan struct {
	Args []string
	// Env are variables as NAME=VALUE that replace those of the caller; see Environ.
	Env []string
	// Bare means that the command is neither an engine nor has placeholders for one. The caller can run it in a cgroup
	// that allows only the leased devices; an engine needs more devices than these.
	Bare bool
	// Bundle is the directory of an OCI bundle whose configuration must have the run options while the command starts. It
	// is empty if there is none.
	Bundle string
	// Notes are sentences for the user about what does not hold.
	Notes []string
}

// Environ returns a caller's environment with the variables of the plan in place of his, and a note for each variable
// that the command gets with another value than the caller has set.
func (p Plan) Environ(inherited []string) (env, notes []string) {
	own := map[string]string{}
	for _, variable := range p.Env {
		name, value, _ := strings.Cut(variable, "=")
		own[name] = value
	}
	for _, variable := range inherited {
		name, before, _ := strings.Cut(variable, "=")
		value, replaced := own[name]
		if !replaced {
			env = append(env, variable)
			value, replaced = own[apptainerPrefix+name] // it counts in the container
		}
		if replaced && value != before {
			notes = append(notes, fmt.Sprintf("%s=%q of this environment is replaced by %q of the lease", name,
				wording.Shorten(before, maxShown), wording.Shorten(value, maxShown)))
		}
	}
	return append(env, p.Env...), notes
}

// Lease is what is known of the leased devices.
type Lease struct {
	model.RunOptions // that the plugin gave for the devices

	// IDs are those of the devices. Those of shared devices have a suffix that begins with "::".
	IDs []string
	// Limit is the time after which the command is killed; 0 means none.
	Limit time.Duration
	// ByIndex has CUDA_VISIBLE_DEVICES name GPUs by index instead of UUID. MIG devices always have UUIDs there.
	ByIndex bool
	// HostIndexes are the indexes of the devices on the host, in the order of the IDs; one that is not known is empty.
	HostIndexes []string
	// Confined means that the command can open no other devices, so that it counts them from 0.
	Confined bool
}

// For returns the plan for a command with leased devices.
//
// An error says what is wrong with the command and what to write instead, or what is wrong with the run options. It
// wraps ErrCannotFollow if a container may start when the lease has ended, and arguments.ErrInexpressible if the run
// options are valid, but the engine cannot take them.
func For(args []string, leased Lease) (Plan, error) {
	if len(args) == 0 || args[0] == "" {
		return Plan{}, errors.New("there is no command to run")
	}
	if err := leased.Check(); err != nil {
		return Plan{}, fmt.Errorf("run options of the devices: %w", err)
	}
	uuids, err := uuidsOf(leased.IDs)
	if err != nil {
		return Plan{}, err
	}
	l := lease{leased, uuids}
	expanded, u, err := l.expand(args)
	if err != nil {
		return Plan{}, err
	}
	name := path.Base(args[0])
	e, isEngine := engines[name]
	without, unsupported := instead[name]
	switch {
	case u.named && (isEngine || unsupported):
		return Plan{Args: expanded}, nil
	case unsupported:
		return Plan{}, fmt.Errorf("%s cannot be given devices by itself: %s", name, without)
	case !isEngine:
		env, notes, err := l.env()
		if err != nil {
			return Plan{}, err
		}
		if !u.named {
			notes = append(notes, innerEngine(args)...)
		}
		return Plan{Args: expanded, Env: env, Bare: !u.engine, Notes: notes}, nil
	}
	i, err := e.behindVerb(name, expanded)
	if err != nil {
		return Plan{}, err
	}
	given, err := e.given(expanded[i:])
	if err != nil {
		return Plan{}, err
	}
	if err := e.checkRestart(name, given); err != nil {
		return Plan{}, err
	}
	if e.bundles {
		return l.bundle(name, expanded, given)
	}
	notes, err := l.conflicts(name, e, given)
	if err != nil {
		return Plan{}, err
	}
	if e.placeholder == "" {
		return l.apptainer(name, expanded, i, notes)
	}
	return l.container(name, expanded, i, given, notes)
}

// lease is a Lease whose IDs have been read.
type lease struct {
	Lease

	uuids []string
}

// uuidsOf returns the UUIDs in device IDs, each once: CUDA sees no device at all if its variable has one twice.
func uuidsOf(ids []string) (uuids []string, err error) {
	for _, id := range ids {
		uuid, _, _ := strings.Cut(id, "::")
		unsuitable := strings.ContainsFunc(uuid, func(r rune) bool {
			return r == ',' || unicode.IsSpace(r) || !unicode.IsPrint(r)
		})
		if uuid == "" || uuid[0] == '-' || unsuitable {
			return nil, fmt.Errorf("device ID %q: it cannot be passed to a command", wording.Shorten(id, maxShown))
		}
		if !slices.Contains(uuids, uuid) {
			uuids = append(uuids, uuid)
		}
	}
	return uuids, nil
}

// env returns the variables of a command that runs on the host. It leaves out those whose value is in a mount that
// only containers have, such as CUDA_MPS_PIPE_DIRECTORY, and notes that.
func (l lease) env() (env, notes []string, err error) {
	for _, name := range slices.Sorted(maps.Keys(l.Envs)) {
		value := l.Envs[name]
		mounted := slices.ContainsFunc(l.Mounts, func(m model.Mount) bool {
			return value == m.ContainerPath || strings.HasPrefix(value, m.ContainerPath+"/")
		})
		switch {
		case name == visibleDevices:
		case mounted:
			notes = append(notes, fmt.Sprintf("%s is not set: %q exists only in containers", name,
				wording.Shorten(value, maxShown)))
		default:
			env = append(env, name+"="+value)
		}
	}
	switch {
	case !l.ByIndex:
	case slices.ContainsFunc(l.uuids, isMIG):
		notes = append(notes, visibleDevices+" has UUIDs, since MIG devices have no index there")
	default:
		indexes, err := l.indexes()
		return append(env, busOrder, visibleDevices+"="+strings.Join(indexes, ",")), notes, err
	}
	return append(env, visibleDevices+"="+strings.Join(l.uuids, ",")), notes, nil
}

// isMIG reports whether a UUID is that of a MIG device.
func isMIG(uuid string) bool { return strings.HasPrefix(uuid, "MIG-") }

// indexes returns the indexes by which the command finds the devices, each once.
func (l lease) indexes() (list []string, err error) {
	if l.Confined {
		for i := range l.uuids {
			list = append(list, strconv.Itoa(i))
		}
		return list, nil
	}
	for i, id := range l.IDs {
		if i >= len(l.HostIndexes) {
			return nil, noIndex(id)
		}
		if _, err := strconv.ParseUint(l.HostIndexes[i], 10, 32); err != nil {
			return nil, noIndex(id)
		}
		if !slices.Contains(list, l.HostIndexes[i]) {
			list = append(list, l.HostIndexes[i])
		}
	}
	return list, nil
}

func noIndex(id string) error {
	return fmt.Errorf("the index of device %q on this host is not known: leave out --ids index",
		wording.Shorten(id, maxShown))
}

// innerEngine notes that an argument of a bare command is an engine, as in `sudo docker run IMAGE`: its container does
// not get the devices.
func innerEngine(args []string) []string {
	for i, arg := range args[1:] {
		e, ok := engines[path.Base(arg)]
		if !ok || e.placeholder == "" || !slices.ContainsFunc(args[i+2:], func(a string) bool {
			return slices.Contains(e.verbs, a) || slices.Contains(e.refused, a)
		}) {
			continue
		}
		name := path.Base(args[0])
		return []string{fmt.Sprintf("%s runs %s without the devices: only a command that begins with an engine gets "+
			"options for them; add the argument %s behind its run", name, path.Base(arg), e.placeholder)}
	}
	return nil
}
