// Package inject gives containers of runtimes without CDI the devices that their annotations name, by putting them into
// config.json before the container is created. It is the same work as that of an engine with CDI, and cdi does it.
//
//	annotations cdi.k8s.io/* --requested--> names --policy--> allowed names --cdi--> config.json
//
// Whoever may write a container's annotations may ask for devices, and the policy of the node (policy.go) decides which
// ones are given, and to which containers (rules.go). It can demand that they are those that the kubelet gave the
// container (allocated.go). [Injector.Allowed] is the only place that decides, for all positions, which annotated
// devices a container may have. The environment of the container, which is the image's, is not read. Everything is
// given or nothing: an error leaves config.json as it was. Log writes problems to the log that the policy names
// (log.go).
//
// [Injector.Config] is for engines with precreate hooks, [Injector.Bundle] for a program in front of a runtime, whose
// command line ParseCommand reads, and [Injector.Preview] for a container that exists already.
package inject

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/internal/trust"
)

// maxEdited is the size in bytes of the largest config.json that gets devices: editing takes 60 times its memory. Real
// ones have less than 100 KB.
const maxEdited = 4 << 20

// Injector has the paths of the node's files.
type Injector struct {
	// PolicyFile is the policy. It need not exist.
	PolicyFile string
	// CDIDirs are the directories of CDI specs, from the lowest priority to the highest.
	CDIDirs []string
	// RuntimeDir is the directory of the control socket of "gpu-cdi-plugin serve", and PodLogs that in which the
	// kubelet has a directory for each pod. They are used only where the policy asks for what the kubelet gave.
	RuntimeDir, PodLogs string
	// SyslogSocket is where the syslog daemon receives datagrams. It is used only where the policy has it for a log.
	SyslogSocket string
}

// Config returns a config.json with the devices that its annotations name, or nil if it has them already or names none.
// There is no bundle, so its owner is unknown to the policy.
func (i Injector) Config(config []byte) ([]byte, error) { return i.edit(config, nil, false) }

// Bundle puts the devices that the annotations of a bundle's config.json name into it. The bundle may belong to another
// user.
func (i Injector) Bundle(dir string) error {
	_, err := cdi.EditBundle(dir, func(config []byte, owner uint32) ([]byte, error) {
		return i.edit(config, &owner, false)
	})
	return err
}

// Edited is a config.json before and after the devices that its annotations name were put into it.
type Edited struct {
	// Devices names the devices for messages, as "device nvidia.com/gpu=0 and 1 more".
	Devices string
	// Before is the bundle's config.json, and After is the same with the devices. Both are nil if nothing changes.
	Before, After []byte
}

// Preview returns what Bundle would write to config.json, and writes nothing. The annotations are those that the
// runtime read: if config.json asks for devices, all of its annotations must be among them. In a user namespace it
// differs: the device nodes are the caller's to make.
func (i Injector) Preview(dir string, annotations map[string]string) (Edited, error) {
	e := Edited{}
	err := cdi.CheckBundle(dir, func(config []byte, owner uint32) (_ []byte, err error) {
		if e.After, err = i.edit(config, &owner, true); e.After != nil {
			names, _ := requested(config)
			e.Devices, e.Before = describe(names), config
			err = compareAnnotations(config, annotations)
		}
		return e.After, err
	})
	if err != nil {
		return Edited{}, err
	}
	return e, nil
}

// compareAnnotations returns an error if a config.json has an annotation that the runtime does not have: it was
// exchanged after the runtime had read it.
func compareAnnotations(config []byte, runtime map[string]string) error {
	c, err := readContainer(config, nil)
	if err != nil {
		return err
	}
	for _, key := range slices.Sorted(maps.Keys(c.annotations)) {
		if value, ok := runtime[key]; !ok || value != c.annotations[key] {
			return fmt.Errorf("its annotation %.100q is not that of the OCI state: "+
				"config.json is another one than the runtime has read", key)
		}
	}
	return nil
}

func (i Injector) edit(config []byte, owner *uint32, makesNodes bool) ([]byte, error) {
	names, dirs, err := i.Allowed(config, owner)
	if err != nil || len(names) == 0 {
		return nil, err
	}
	after, err := dirs.EditConfig(config, names, makesNodes)
	if errors.Is(err, cdi.ErrStale) { // it names a file, and not the device
		return nil, fmt.Errorf("%s cannot be given: %w", describe(names), err)
	}
	return after, err
}

// Allowed returns the names of the devices that the annotations of a config.json ask for, and the specs that define
// them. If the policy does not allow all of them, or others can change one of the specs, it is an error. Owner is the
// user ID of the bundle's owner, or nil if it is unknown. Without such an annotation there are no names, and nothing of
// the node is read.
func (i Injector) Allowed(config []byte, owner *uint32) ([]string, *cdi.SpecDirs, error) {
	names, err := requested(config)
	if err != nil || len(names) == 0 {
		return nil, nil, err
	}
	if len(config) > maxEdited {
		return nil, nil, fmt.Errorf("device %s is not given: config.json has %d bytes, the limit is %d",
			names[0], len(config), maxEdited)
	}
	dirs := cdi.Load(i.CDIDirs...)
	if err := i.applyPolicy(config, owner, names, dirs); err != nil {
		return nil, nil, err
	}
	if err := checkTrust(dirs.FilesOf(names)); err != nil {
		return nil, nil, err
	}
	return names, dirs, nil
}

func (i Injector) applyPolicy(config []byte, owner *uint32, names []string, dirs *cdi.SpecDirs) error {
	p, err := readPolicy(i.PolicyFile)
	if err != nil {
		return fmt.Errorf("device %s is not given: %w", names[0], err)
	}
	c := &container{}
	if p.dependsOnContainer() {
		if c, err = readContainer(config, owner); err != nil {
			return fmt.Errorf("device %s is not given: %w", names[0], err)
		}
	}
	var mustBeAllocated []string // those that the kubelet must have given
	for _, name := range names {
		must, err := p.check(c, name, fileOf(dirs, name))
		if err != nil {
			return fmt.Errorf("device %s is not given: %w in %s", name, err, i.PolicyFile)
		}
		if must {
			mustBeAllocated = append(mustBeAllocated, name)
		}
	}
	if len(mustBeAllocated) > 0 {
		return i.checkAllocated(c, mustBeAllocated, dirs)
	}
	return nil
}

// describe names the first device, and counts the others.
func describe(names []string) string {
	if len(names) == 1 {
		return "device " + names[0]
	}
	return fmt.Sprintf("device %s and %d more", names[0], len(names)-1)
}

// fileOf is the spec file of a device, or nil if no file defines it.
func fileOf(dirs *cdi.SpecDirs, name string) *cdi.SpecFile {
	if files := dirs.FilesOf([]string{name}); len(files) > 0 {
		return files[0]
	}
	return nil
}

// checkTrust returns an error if others can change a spec file or a hook of it: the runtime runs these hooks as root.
func checkTrust(files []*cdi.SpecFile) error {
	for _, f := range files {
		if err := trust.File(f.Path); errors.Is(err, trust.ErrUnsafe) {
			return fmt.Errorf("devices of %s are not given: its hooks run as root, and %w", f.Path, err)
		}
		for _, hook := range cdi.HookPaths(f.Spec) {
			if err := trust.File(hook); errors.Is(err, trust.ErrUnsafe) {
				return fmt.Errorf("devices of %s are not given: its hook %s runs as root, and %w", f.Path, hook, err)
			}
		}
	}
	return nil
}
