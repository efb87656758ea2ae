// Package inject gives containers the devices that their annotations name, for runtimes without CDI: it adds the
// devices to config.json before the container is created.
//
//	annotations cdi.k8s.io/* --requested--> names --policy--> allowed names --cdi--> config.json
//
// Whoever may write a container's annotations may request devices. The node's policy (policy.go) decides which devices
// are granted, and to which containers (rules.go). The policy can require that the kubelet allocated the devices to
// the container (allocated.go). [Injector.Allowed] is the only place that decides which annotated devices a container
// may have. The environment of the container is not read, since the image sets it. Either all devices are added or
// none: an error leaves config.json unchanged. [Injector.Log] writes problems to the log that the policy names
// (log.go).
//
// [Injector.Config] is for engines with precreate hooks, [Injector.Bundle] for a program that runs in place of a
// runtime and then calls it, and [Injector.Preview] for a container that already exists. ParseCommand parses the
// command line of a runtime.
package inject

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/internal/trust"
)

// maxEdited bounds a config.json to which devices are added, in bytes: editing takes 60 times as much memory. Real
// files have less than 100 KB.
const maxEdited = 4 << 20

// Injector has the paths of the node's files.
type Injector struct {
	// PolicyFile is the path of the policy, which need not exist.
	PolicyFile string
	// EngineFile is the path of the file with the default runtime of the engine that runs gpu-cdi-runtime, which need not
	// exist; empty means none.
	EngineFile string
	// CDIDirs are the directories of CDI specs, from the lowest priority to the highest.
	CDIDirs []string
	// RuntimeDir is the directory of the control socket of "gpu-cdi-plugin serve". PodLogs is the kubelet's directory
	// with a directory of logs for each pod. Both are used only if the policy requires devices that the kubelet
	// allocated.
	RuntimeDir, PodLogs string
	// SyslogSocket is the syslog daemon's datagram socket. It is used only if the policy's log is syslog.
	SyslogSocket string
}

// Config adds the devices that the annotations in config.json name, and returns the new config.json. It returns nil if
// the annotations name no devices or config.json already has them. Since there is no bundle, rules about the bundle's
// owner do not match.
func (i Injector) Config(config []byte) ([]byte, error) { return i.edit(config, nil, false) }

// Bundle adds the devices that the annotations in a bundle's config.json name to that file. The bundle may belong to
// another user.
func (i Injector) Bundle(dir string) error {
	_, err := cdi.EditBundle(dir, func(config []byte, owner uint32) ([]byte, error) {
		return i.edit(config, &owner, false)
	})
	return err
}

// Edited is a config.json before and after devices were added.
type Edited struct {
	// Devices names the devices for messages, such as "device nvidia.com/gpu=0 and 1 more".
	Devices string
	// Before is the bundle's config.json, and After is the same with the devices. Both are nil if nothing changes.
	Before, After []byte
}

// Preview returns what Bundle would write to config.json, without writing. The annotations are those that the runtime
// read: if config.json requests devices, each of its annotations must be among them. If the container has a user
// namespace, the caller must make its device nodes.
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

// compareAnnotations returns an error if config.json has an annotation that the runtime did not read: then config.json
// was replaced after the runtime had read it.
func compareAnnotations(config []byte, runtime map[string]string) error {
	c, err := readContainer(config, nil)
	if err != nil {
		return err
	}
	for _, key := range slices.Sorted(maps.Keys(c.annotations)) {
		if value, ok := runtime[key]; !ok || value != c.annotations[key] {
			return fmt.Errorf("its annotation %.100q differs from the OCI state's: "+
				"config.json was replaced after the runtime had read it", key)
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
	if errors.Is(err, cdi.ErrStale) { // the error names a file, not the device
		return nil, fmt.Errorf("%s cannot be given: %w", describe(names), err)
	}
	return after, err
}

// Allowed returns the names of the devices that the annotations in config.json request, and the specs that define
// them. It returns an error if the policy does not allow all of the devices, or if a user other than root can change
// one of the specs. Owner is the user ID of the bundle's owner, or nil if it is unknown. If no devices are requested,
// Allowed returns no names and reads no file of the host.
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
	var mustBeAllocated []string // devices that the kubelet must have allocated
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

// describe names the first device and counts the others.
func describe(names []string) string {
	if len(names) == 1 {
		return "device " + names[0]
	}
	return fmt.Sprintf("device %s and %d more", names[0], len(names)-1)
}

// fileOf returns the spec file of a device, or nil if no file defines the device.
func fileOf(dirs *cdi.SpecDirs, name string) *cdi.SpecFile {
	if files := dirs.FilesOf([]string{name}); len(files) > 0 {
		return files[0]
	}
	return nil
}

// checkTrust returns an error if a user other than root can change one of the spec files, or a hook in them: the
// runtime runs these hooks as root.
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
