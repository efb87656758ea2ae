package live

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"path/filepath"
	"reflect"
	"slices"
	"strings"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/hook/live/devcgroup"
	"gpu-cdi-plugin/internal/hookargs"
)

// errNotLive means that a part of a spec cannot be added to a created container. The positions of the hook that edit
// config.json, before the container is created, can add it.
var errNotLive = errors.New("it cannot be added to a container that already exists")

// plan is what a container gets, in the order in which it is applied.
type plan struct {
	rules  []devcgroup.Rule
	nodes  []node
	mounts []mount
	// work has the arguments of the specs' createContainer hooks.
	work []*hookargs.CreateContainer
	// variables are the names of environment variables that the container should have but cannot get.
	variables []string

	// root is the path of the container's root in config.json, and users says whether the container has a user
	// namespace. mapsRoot is false if the mappings of the user namespace lack the host's root.
	root            string
	users, mapsRoot bool
}

// node is a device node. The owners are IDs in the container.
type node struct {
	path     string
	mode     uint32 // includes the type, S_IFCHR or S_IFBLK
	device   uint64
	uid, gid uint32
}

// mount is a bind mount of a file or directory of the host.
type mount struct {
	source, target string
	recursive      bool
	// attributes are the mount's MOUNT_ATTR_* flags.
	attributes uint64
	// propagation is MS_PRIVATE or MS_SLAVE; deep applies it also to the mounts below.
	propagation uint64
	deep        bool
}

// makePlan plans the changes that a created container needs so that it matches the config.json in `after` instead of
// that in `before`. It is a pure function. It returns an error if a created container cannot get the difference.
func makePlan(before, after []byte) (*plan, error) {
	var old, config oci.Spec
	if err := errors.Join(json.Unmarshal(before, &old), json.Unmarshal(after, &config)); err != nil {
		return nil, fmt.Errorf("read config.json: %w", err)
	}
	if old.Root == nil || old.Root.Path == "" {
		return nil, errors.New("config.json has no root.path")
	}
	fill(&old)
	fill(&config)
	p := &plan{root: old.Root.Path, users: slices.ContainsFunc(old.Linux.Namespaces, isUser)}
	isRoot := func(m oci.LinuxIDMapping) bool { return m.HostID == 0 }
	p.mapsRoot = len(old.Linux.UIDMappings) == 0 ||
		slices.ContainsFunc(old.Linux.UIDMappings, isRoot) || slices.ContainsFunc(old.Linux.GIDMappings, isRoot)
	var errs []error
	for _, d := range added(old.Linux.Devices, config.Linux.Devices) {
		errs = append(errs, p.addNode(d))
	}
	// The last matching rule counts, so new rules must come after old ones.
	rules, known := config.Linux.Resources.Devices, old.Linux.Resources.Devices
	n := min(len(known), len(rules))
	if !slices.EqualFunc(known, rules[:n], func(a, b oci.LinuxDeviceCgroup) bool { return reflect.DeepEqual(a, b) }) {
		errs, n = append(errs, fmt.Errorf("a change of device rules: %w", errNotLive)), len(rules)
	}
	for _, r := range rules[n:] {
		errs = append(errs, p.addRule(r))
	}
	for _, m := range added(old.Mounts, config.Mounts) {
		errs = append(errs, p.addMount(m, old.Mounts))
	}
	errs = append(errs, p.addHooks(old.Hooks, config.Hooks))
	for _, v := range added(old.Process.Env, config.Process.Env) {
		name, _, _ := strings.Cut(v, "=")
		p.variables = append(p.variables, name)
	}
	errs = append(errs, checkRest(&old, &config))
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return p, nil
}

func isUser(n oci.LinuxNamespace) bool { return n.Type == oci.UserNamespace }

// fill allocates the parts of a configuration that have devices.
func fill(c *oci.Spec) {
	if c.Process == nil {
		c.Process = &oci.Process{}
	}
	if c.Hooks == nil {
		c.Hooks = &oci.Hooks{}
	}
	if c.Linux == nil {
		c.Linux = &oci.Linux{}
	}
	if c.Linux.Resources == nil {
		c.Linux.Resources = &oci.LinuxResources{}
	}
}

// added returns the elements of `after` that `before` does not have. A container can have tens of thousands of
// variables and mounts, so they are looked up in a map, not compared one by one.
func added[T any](before, after []T) []T {
	had := make(map[string]bool, len(before))
	for _, b := range before {
		had[keyOf(b)] = true
	}
	return slices.DeleteFunc(slices.Clone(after), func(a T) bool { return had[keyOf(a)] })
}

// keyOf returns equal keys for equal parts of a configuration. The parts were decoded from JSON, so encoding them
// cannot fail.
func keyOf(part any) string {
	data, _ := json.Marshal(part)
	return string(data)
}

func (p *plan) addNode(d oci.LinuxDevice) error {
	n := node{path: d.Path, device: unix.Mkdev(uint32(d.Major), uint32(d.Minor))}
	switch d.Type {
	case "c", "u":
		n.mode = unix.S_IFCHR
	case "b":
		n.mode = unix.S_IFBLK
	default:
		return fmt.Errorf("device node %s of type %q: %w", d.Path, d.Type, errNotLive)
	}
	mode := fs.FileMode(0o666) // like runc
	if d.FileMode != nil {
		mode = *d.FileMode
	}
	n.mode |= uint32(mode.Perm())
	if d.UID != nil {
		n.uid = *d.UID
	}
	if d.GID != nil {
		n.gid = *d.GID
	}
	p.nodes = append(p.nodes, n)
	return checkPath("device node", d.Path)
}

func checkPath(what, name string) error {
	if !path.IsAbs(name) || path.Clean(name) != name || name == "/" {
		return fmt.Errorf("%s %.200q: want a clean absolute path", what, name)
	}
	return nil
}

func (p *plan) addRule(r oci.LinuxDeviceCgroup) error {
	if !r.Allow || r.Major == nil || r.Minor == nil || r.Type != "c" && r.Type != "b" {
		return fmt.Errorf("a device rule other than one that allows one device: %w", errNotLive)
	}
	if r.Access != "" {
		p.rules = append(p.rules, devcgroup.Rule{
			Type: r.Type[0], Major: uint32(*r.Major), Minor: uint32(*r.Minor), Access: r.Access,
		})
	}
	return nil
}

// attributes maps mount options to attributes of a mount.
var attributes = map[string]uint64{
	"ro": unix.MOUNT_ATTR_RDONLY, "nosuid": unix.MOUNT_ATTR_NOSUID, "nodev": unix.MOUNT_ATTR_NODEV,
	"noexec": unix.MOUNT_ATTR_NOEXEC,
}

func (p *plan) addMount(o oci.Mount, old []oci.Mount) error {
	m := mount{source: o.Source, target: filepath.Clean(o.Destination), propagation: unix.MS_SLAVE, deep: true}
	isBind := o.Type == "bind"
	for _, option := range o.Options {
		switch option {
		case "rw", "relatime": // the defaults
		case "bind":
			isBind = true
		case "rbind":
			isBind, m.recursive = true, true
		case "private", "rprivate":
			m.propagation, m.deep = unix.MS_PRIVATE, option == "rprivate"
		case "slave", "rslave":
			m.propagation, m.deep = unix.MS_SLAVE, option == "rslave"
		case "idmap", "ridmap":
			// The CDI library adds this option in a user namespace. It would make the container's root the owner of
			// the host's files, who with CAP_SYS_ADMIN in its namespace can make a read-only mount writable.
		default:
			attribute, ok := attributes[option]
			if !ok {
				return fmt.Errorf("mount %s with the option %.100q: %w", o.Destination, option, errNotLive)
			}
			m.attributes |= attribute
		}
	}
	if !isBind {
		return fmt.Errorf("mount %s of the type %.100q: %w", o.Destination, o.Type, errNotLive)
	}
	for _, hidden := range old {
		if strings.HasPrefix(filepath.Clean(hidden.Destination), m.target+"/") {
			return fmt.Errorf("mount %s, which would hide that at %s: %w", m.target, hidden.Destination, errNotLive)
		}
	}
	p.mounts = append(p.mounts, m)
	return errors.Join(checkPath("mount", m.target), checkPath("source of mount "+m.target, filepath.Clean(m.source)))
}

// hookProgram is the file name of the hook in specs of this project.
const hookProgram = "prestart-hook"

func (p *plan) addHooks(old, config *oci.Hooks) error {
	var errs []error
	for _, h := range added(old.CreateContainer, config.CreateContainer) {
		var work *hookargs.CreateContainer
		err := errNotLive
		if len(h.Args) > 0 && path.Base(h.Path) == hookProgram {
			work, err = hookargs.Parse(h.Args[1:])
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("hook %s of the createContainer stage: %w", h.Path, err))
			continue
		}
		p.work = append(p.work, work)
	}
	for _, stage := range []struct {
		name       string
		old, hooks []oci.Hook
	}{
		{"prestart", old.Prestart, config.Prestart}, //nolint:staticcheck // deprecated, but specs may have it
		{"createRuntime", old.CreateRuntime, config.CreateRuntime},
		{"startContainer", old.StartContainer, config.StartContainer},
		{"poststart", old.Poststart, config.Poststart},
		{"poststop", old.Poststop, config.Poststop},
	} {
		for _, h := range added(stage.old, stage.hooks) {
			errs = append(errs, fmt.Errorf("hook %s of the %s stage: %w", h.Path, stage.name, errNotLive))
		}
	}
	return errors.Join(errs...)
}

// checkRest returns an error if two configurations also differ in parts that a plan cannot change.
func checkRest(old, config *oci.Spec) error {
	if more := added(old.Process.User.AdditionalGids, config.Process.User.AdditionalGids); len(more) > 0 {
		return fmt.Errorf("additional group %d of the process: %w", more[0], errNotLive)
	}
	if !reflect.DeepEqual(old.Linux.NetDevices, config.Linux.NetDevices) {
		return fmt.Errorf("a network device: %w", errNotLive)
	}
	if !reflect.DeepEqual(old.Linux.IntelRdt, config.Linux.IntelRdt) {
		return fmt.Errorf("a class of Intel RDT: %w", errNotLive)
	}
	rest := *old
	process, linux, resources := *old.Process, *old.Linux, *old.Linux.Resources
	rest.Process, rest.Linux, linux.Resources = &process, &linux, &resources
	process.Env, rest.Mounts, rest.Hooks = config.Process.Env, config.Mounts, config.Hooks
	linux.Devices, resources.Devices = config.Linux.Devices, config.Linux.Resources.Devices
	if !reflect.DeepEqual(&rest, config) {
		return fmt.Errorf("a change of the container other than devices, mounts and hooks: %w", errNotLive)
	}
	return nil
}
