// Package devcgroup gives an existing container access to more devices: it adds rules to the device cgroup of the
// container's process before that process starts the container's program.
//
// With cgroup v1 the kernel keeps a list of rules, to which the package adds its own. With cgroup v2 BPF programs
// decide: each program that is attached to the container's cgroup is replaced by one that first admits the new devices
// and then does what the old program did. On a host with both versions, each is changed that restricts the container.
// If systemd manages the cgroup, the devices are also added to its unit, since systemd applies the unit's list again
// at each daemon-reload.
//
// Cgroups above the container's stay unchanged and must admit the devices as well. A cgroup with another process is
// never changed. After an error nothing is undone: the runtime then removes the container and its cgroups.
package devcgroup

import (
	"context"
	"fmt"
	"slices"
	"strings"
)

// Host has the paths of the host's files that the package uses. The process must be in the host's mount namespace.
type Host struct {
	Proc    string // usually /proc
	Cgroups string // usually /sys/fs/cgroup
	Systemd string // systemd's own socket, usually /run/systemd/private
}

// Rule admits a device. With cgroup v2 a single rule must allow all that an open(2) requests: if an old rule has "r"
// and the new one has "w", opening for reading and writing is denied.
type Rule struct {
	Type         byte   // 'c' for a character device, 'b' for a block device
	Major, Minor uint32 // the kernel's numbers
	Access       string // some of "rwm": read, write, mknod
}

// String formats the rule for cgroup v1, like "c 195:0 rw".
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

// merge combines the rules for the same device.
func merge(rules []Rule) []Rule {
	var merged []Rule
	for _, r := range rules {
		same := slices.IndexFunc(merged, func(m Rule) bool { return m.device() == r.device() })
		if same < 0 {
			merged = append(merged, r)
		} else {
			merged[same].Access = union(merged[same].Access, r.Access)
		}
	}
	return merged
}

// union returns the access letters that are in a or in b.
func union(a, b string) string {
	for _, letter := range b {
		if !strings.ContainsRune(a, letter) {
			a += string(letter)
		}
	}
	return a
}

// Allow lets the process and its children use the devices of the rules, in all cgroups that restrict it. The change in
// systemd comes first: systemd then writes the unit's whole list to the cgroup, or attaches another program.
//
// The context limits the calls to systemd, which take at most 5 s together. Nothing else waits.
func (c *Cgroups) Allow(ctx context.Context, rules []Rule) error {
	for _, r := range rules {
		if err := r.validate(); err != nil {
			return err
		}
	}
	rules = merge(rules)
	var restricted []*cgroup
	for _, cg := range c.list {
		is, err := cg.isRestricted()
		if err != nil {
			return fmt.Errorf("read the device rules of %s: %w", cg, err)
		}
		if !is {
			continue
		}
		if err := cg.checkNoOther(c.pid); err != nil {
			return fmt.Errorf("add device rules to %s: %w", cg, err)
		}
		restricted = append(restricted, cg)
	}
	for _, cg := range restricted {
		if scope := scopeOf(cg.path); scope != "" {
			if err := allowInScope(ctx, c.host.Systemd, cg.path, rules); err != nil {
				return fmt.Errorf("add devices to systemd's unit %s, so that a daemon-reload keeps them: %w", scope, err)
			}
		}
	}
	for _, cg := range restricted {
		if err := cg.allow(c.host.Proc, rules); err != nil {
			return fmt.Errorf("add device rules to %s: %w", cg, err)
		}
	}
	return nil
}
