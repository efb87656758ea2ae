package dra

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"gpu-cdi-plugin/internal/wording"
)

// The type of the configurations for this driver that a claim or DeviceClass can have.
const (
	configVersion = "gpu-cdi-plugin/v1"
	configKind    = "GPUConfig"
)

// maxConfig bounds a configuration, in bytes, as the API does.
const maxConfig = 10 << 10

// config is a DeviceAllocationConfiguration: what a claim or its DeviceClass says to a driver.
type config struct {
	Source   string          `json:"source"`
	Requests bounded[string] `json:"requests"` // none means all
	Opaque   *struct {
		Driver     string          `json:"driver"`
		Parameters json.RawMessage `json:"parameters"`
	} `json:"opaque"`

	policy string // of the parameters; see parse
}

// fromClass is the Source of the configuration of a DeviceClass, which only administrators write.
const fromClass = "FromClass"

// parameters are those of a configuration.
type parameters struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	PreStart   struct {
		Policy string `json:"policy"` // empty for that of the node's configuration
	} `json:"prestart"`
}

// policies are the names of the policies of package prepare.
var policies = []string{"none", "check", "clean", reset}

const reset = "reset"

// PreStart is how a claim and its DeviceClass want devices prepared, by the names of policies.
type PreStart struct {
	// Policy replaces the policy of the resource, and Least is the least thorough policy that the claim accepts. Either
	// may be empty.
	Policy, Least string
}

// configs returns the configurations of a claim and its DeviceClasses for a driver. One that is wrong or unknown is an
// error, since the containers would not run as they were meant to.
func (c *claim) configs(driver string) ([]config, error) {
	var list []config
	for _, one := range c.Status.Allocation.Devices.Config {
		if one.Opaque == nil || one.Opaque.Driver != driver {
			continue
		}
		if err := one.parse(); err != nil {
			return nil, fmt.Errorf("%s for %s: %w", one.label(), driver, err)
		}
		list = append(list, one)
	}
	return list, nil
}

func (c *config) label() string {
	if c.Source == fromClass {
		return "the configuration of its DeviceClass"
	}
	return "its configuration"
}

// parse checks the parameters.
func (c *config) parse() error {
	p, err := parseParameters(c.Opaque.Parameters)
	if err != nil {
		return err
	}
	if c.policy = p.PreStart.Policy; c.policy == reset && c.Source != fromClass {
		return fmt.Errorf("prestart.policy %s is for DeviceClasses only, since a reset concerns more than the claim", reset)
	}
	return nil
}

func parseParameters(data []byte) (*parameters, error) {
	if len(data) > maxConfig {
		return nil, fmt.Errorf("it has more than %d bytes", maxConfig)
	}
	var of struct{ APIVersion, Kind string } // first, since those of other types have other fields
	if err := json.Unmarshal(data, &of); err != nil {
		return nil, err
	}
	if of.APIVersion != configVersion || of.Kind != configKind {
		return nil, fmt.Errorf("its apiVersion is %q and its kind %q, want %s and %s",
			wording.Shorten(of.APIVersion, maxName), wording.Shorten(of.Kind, maxName), configVersion, configKind)
	}
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	p := &parameters{}
	if err := d.Decode(p); err != nil {
		return nil, wording.Limit(err)
	}
	if policy := p.PreStart.Policy; policy != "" && !slices.Contains(policies, policy) {
		return nil, fmt.Errorf("prestart.policy is %q, want one of %s", wording.Shorten(policy, maxName),
			strings.Join(policies, ", "))
	}
	return p, nil
}

// preStartOf returns how the devices of a request are to be prepared, by its name in the results.
func preStartOf(list []config, request string) (PreStart, error) {
	var p PreStart
	for i := range list {
		c := &list[i]
		if c.policy == "" || !c.appliesTo(request) {
			continue
		}
		field := &p.Least
		if c.Source == fromClass {
			field = &p.Policy
		}
		if *field != "" {
			return PreStart{}, fmt.Errorf("%s has prestart.policy twice for the request %s: %s and %s", c.label(), request,
				*field, c.policy)
		}
		*field = c.policy
	}
	return p, nil
}

// appliesTo reports whether the configuration is for a request. "main" is also for the subrequest "main/sub".
func (c *config) appliesTo(request string) bool {
	main, _, _ := strings.Cut(request, "/")
	return len(c.Requests) == 0 || slices.Contains(c.Requests, request) || slices.Contains(c.Requests, main)
}
