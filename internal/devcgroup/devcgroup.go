// Package devcgroup lets a container that exists already use more devices: it adds rules to the device cgroup of the
// container's process, before the process starts the container's program.
//
// With cgroup v1 the kernel keeps a list of rules, to which a rule is added. With cgroup v2 BPF programs decide: each
// program that is attached to the container's cgroup is replaced with one that admits the new devices first, and does
// what it did otherwise. On a hybrid host both are done where both restrict the container. If systemd manages the
// cgroup, its unit gets the devices too: systemd applies the unit's list again at each daemon-reload.
//
// The package changes no cgroup above the container's, which must admit the devices as well. It changes no cgroup that
// has a process beside the given one. That proves that no other process gets a device. It does not prove that the
// process is the container's: the caller proves that, with a pidfd that it opens before and asks again afterwards.
package devcgroup

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"gpu-cdi-plugin/internal/regular"
)

// Host has the paths of the host that the package uses. The process must be in the host's mount namespace.
type Host struct {
	Proc    string // usually /proc
	Dev     string // usually /dev
	Systemd string // systemd's own socket, usually /run/systemd/private
}

// Rule admits a device. With cgroup v2 one rule must allow all that an open asks for: with "r" from an old rule and "w"
// from this one, opening for reading and writing is denied.
type Rule struct {
	Type         byte   // 'c' for a character device, 'b' for a block device
	Major, Minor uint32 // the kernel's numbers
	Access       string // some of "rwm": read, write, create a node
}

// String is the rule as cgroup v1 has it, such as "c 195:0 rw".
func (r Rule) String() string { return fmt.Sprintf("%s %s", r.device(), r.Access) }

func (r Rule) device() string { return fmt.Sprintf("%c %d:%d", r.Type, r.Major, r.Minor) }

func (r Rule) validate() error {
	if r.Type != 'c' && r.Type != 'b' {
		return fmt.Errorf("device rule %q: the type is neither c nor b", r)
	}
	if r.Access == "" || strings.Trim(r.Access, "rwm") != "" {
		return fmt.Errorf("device rule %q: the access is not some of the letters rwm", r)
	}
	return nil
}

// merge makes one rule of those for the same device.
func merge(rules []Rule) []Rule {
	var merged []Rule
	for _, r := range rules {
		same := slices.IndexFunc(merged, func(m Rule) bool { return m.device() == r.device() })
		if same < 0 {
			merged = append(merged, r)
		} else {
			merged[same].Access += without(r.Access, merged[same].Access)
		}
	}
	return merged
}

// Change is what Allow did.
type Change struct {
	// Notes are sentences about what can still keep the container from a device, now or later.
	Notes []string

	undo []func() error
}

// Undo takes back what Allow did, except in a systemd unit, whose list can only grow: with cgroup v1 the next
// daemon-reload allows the devices again. A device that the container was allowed before stays allowed.
func (c *Change) Undo() error {
	var errs []error
	for _, undo := range slices.Backward(c.undo) {
		errs = append(errs, undo())
	}
	c.undo = nil
	return errors.Join(errs...)
}

// Allow lets the process, and what it starts, use the devices of the rules. It changes nothing where the process is not
// restricted. A second call with the same rules changes nothing either, with one exception: where the kernel hardens
// its BPF compiler (bpf_jit_harden), the rules are added again. On an error everything is undone.
//
// The context bounds the calls to systemd, which take at most 5 s; all else does not wait.
func Allow(ctx context.Context, host Host, pid int, rules []Rule) (*Change, error) {
	change := &Change{}
	if len(rules) == 0 {
		return change, nil
	}
	for _, r := range rules {
		if err := r.validate(); err != nil {
			return nil, err
		}
	}
	rules = merge(rules)
	cgroups, err := find(host.Proc, pid)
	if err != nil {
		return nil, fmt.Errorf("find the device cgroup of process %d: %w", pid, err)
	}
	defer func() {
		for _, c := range cgroups {
			c.close()
		}
	}()
	if err := change.apply(ctx, host, pid, cgroups, rules); err != nil {
		return nil, errors.Join(err, change.Undo())
	}
	return change, nil
}

// apply changes the cgroups that restrict the process, after it has checked all of them. systemd comes first: it writes
// a unit's whole list to the cgroup, or attaches another program, when the list changes.
func (c *Change) apply(ctx context.Context, host Host, pid int, cgroups []*cgroup, rules []Rule) error {
	var restricted []*cgroup
	for _, cg := range cgroups {
		is, err := cg.isRestricted()
		if err != nil {
			return fmt.Errorf("read the device rules of %s: %w", cg, err)
		}
		if !is {
			continue
		}
		if err := cg.checkAlone(pid); err != nil {
			return fmt.Errorf("add device rules to %s: %w", cg, err)
		}
		restricted = append(restricted, cg)
	}
	for _, cg := range restricted {
		if unit := unitOf(cg.path); unit != "" {
			if err := c.allowInUnit(ctx, host, cg.path, rules); err != nil {
				return fmt.Errorf("add devices to systemd's unit %s, so that a daemon-reload keeps them: %w", unit, err)
			}
		}
	}
	for _, cg := range restricted {
		if err := cg.allow(c, rules); err != nil {
			return fmt.Errorf("add device rules to %s: %w", cg, err)
		}
	}
	return c.noteInherited(cgroups)
}

const maxRead = 1 << 20 // bytes of a file of /proc/PID or of a cgroup

func readFile(path string, limit int64) (string, error) {
	data, err := regular.ReadFile(path, limit)
	return string(data), err
}
