package inject

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// rule allows devices to the containers that meet all of its conditions.
type rule struct {
	// Annotations are annotations that the container must have, with patterns of their values, in which "*" is any
	// text. Nil means no condition.
	Annotations map[string]string `yaml:"annotations"`
	// UserNamespace says whether the container must or must not have a user namespace; nil means no condition.
	UserNamespace *bool `yaml:"user-namespace"`
	// BundleOwner are the user IDs that may own the bundle; nil means no condition. If there is no bundle, the
	// condition is not met.
	BundleOwner []int `yaml:"bundle-owner"`
	limits      `yaml:",inline"`
}

// container has what the rules' conditions refer to. All except the owner comes from config.json.
type container struct {
	annotations map[string]string
	cgroup      string
	// userNamespace means that the container has a user namespace. hostRoot means that this namespace may map a user
	// or a group to the host's root.
	userNamespace, hostRoot bool
	// owner is the user who owns the bundle, or nil if there is no bundle.
	owner *uint32
}

// readContainer reads the parts of config.json that rules need. Its errors name no Go types.
func readContainer(config []byte, owner *uint32) (*container, error) {
	var c struct {
		Annotations map[string]string `json:"annotations"`
		Linux       struct {
			CgroupsPath string `json:"cgroupsPath"`
			Namespaces  []struct {
				Type string `json:"type"`
				Path string `json:"path"`
			} `json:"namespaces"`
			UIDMappings []idMapping `json:"uidMappings"`
			GIDMappings []idMapping `json:"gidMappings"`
		} `json:"linux"`
	}
	if err := json.Unmarshal(config, &c); err != nil {
		if wrong, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
			err = fmt.Errorf("%.100q has the wrong type", wrong.Field)
		}
		return nil, fmt.Errorf("read config.json: %w", err)
	}
	read := &container{annotations: c.Annotations, cgroup: c.Linux.CgroupsPath, owner: owner}
	for _, n := range c.Linux.Namespaces {
		if n.Type == "user" {
			read.userNamespace = true
			// In a user namespace that exists already, runtimes ignore the mappings in config.json: host root may be
			// mapped.
			read.hostRoot = read.hostRoot || n.Path != ""
		}
	}
	isRoot := func(m idMapping) bool { return m.HostID == 0 }
	read.hostRoot = read.hostRoot || len(c.Linux.UIDMappings) == 0 ||
		slices.ContainsFunc(c.Linux.UIDMappings, isRoot) || slices.ContainsFunc(c.Linux.GIDMappings, isRoot)
	return read, nil
}

type idMapping struct {
	HostID uint32 `json:"hostID"`
}

// fits returns an error that names the first condition that the container does not meet.
func (r *rule) fits(c *container) error {
	for _, key := range slices.Sorted(maps.Keys(r.Annotations)) {
		if value, ok := c.annotations[key]; !ok {
			return fmt.Errorf("the container has no annotation %q", key)
		} else if !matches(r.Annotations[key], value) {
			return fmt.Errorf("the annotation %q is %.100q", key, value)
		}
	}
	switch {
	case r.UserNamespace == nil:
	case *r.UserNamespace && !c.userNamespace:
		return errors.New("the container has no user namespace")
	case *r.UserNamespace && c.hostRoot:
		return errors.New("the host's root may be a user or group of the container's user namespace")
	case !*r.UserNamespace && c.userNamespace:
		return errors.New("the container has a user namespace")
	}
	switch {
	case r.BundleOwner == nil:
	case c.owner == nil:
		return errors.New("the owner of the bundle is not known to a precreate hook")
	case !slices.Contains(r.BundleOwner, int(*c.owner)):
		return fmt.Errorf("the bundle belongs to user %d", *c.owner)
	}
	return nil
}

// matches reports whether a text matches a pattern, in which "*" is any text.
func matches(pattern, text string) bool {
	parts := strings.Split(pattern, "*")
	first, last := parts[0], parts[len(parts)-1]
	if len(parts) == 1 {
		return text == pattern
	}
	if len(text) < len(first)+len(last) || !strings.HasPrefix(text, first) || !strings.HasSuffix(text, last) {
		return false
	}
	text = text[len(first) : len(text)-len(last)]
	for _, part := range parts[1 : len(parts)-1] {
		at := strings.Index(text, part)
		if at < 0 {
			return false
		}
		text = text[at+len(part):]
	}
	return true
}
