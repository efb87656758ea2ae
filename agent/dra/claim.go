package dra

import (
	"fmt"
	"slices"
	"strings"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/health"
	"gpu-cdi-plugin/internal/wording"
	"gpu-cdi-plugin/node"
	"gpu-cdi-plugin/resource"
)

// claim is a ResourceClaim.
type claim struct {
	Metadata Metadata `json:"metadata"`
	Status   struct {
		ReservedFor bounded[consumer] `json:"reservedFor"`
		Allocation  *struct {
			Devices struct {
				Results bounded[result] `json:"results"`
				Config  bounded[config] `json:"config"`
			} `json:"devices"`
		} `json:"allocation"`
	} `json:"status"`
}

// consumer is a ResourceClaimConsumerReference.
type consumer struct {
	Resource string `json:"resource"`
	UID      string `json:"uid"`
}

// result is a DeviceRequestAllocationResult: a device that the scheduler has chosen for a request.
type result struct {
	Request     string              `json:"request"`
	Driver      string              `json:"driver"`
	Pool        string              `json:"pool"`
	Device      string              `json:"device"`
	AdminAccess bool                `json:"adminAccess"`
	Tolerations bounded[toleration] `json:"tolerations"`
	// ShareID and Consumed are set if the claim has only a share of the device.
	ShareID  string `json:"shareID"`
	Consumed struct {
		Memory string `json:"memory"` // a quantity; see share
	} `json:"consumedCapacity"`
}

// checkLengths returns an error if a text of the result is longer than the API allows. All of them can be a part of an
// error, an answer or a record.
func (r *result) checkLengths() error {
	for _, field := range []struct {
		name, text string
		most       int
	}{
		{"request", r.Request, 2*maxName + 1},
		{"pool", r.Pool, maxObject},
		{"device", r.Device, maxName},
		{"shareID", r.ShareID, maxName},
		{"consumedCapacity", r.Consumed.Memory, maxValue},
	} {
		if len(field.text) > field.most {
			return fmt.Errorf("the %s of one of its devices has %d bytes, more than %d", field.name, len(field.text), field.most)
		}
	}
	return nil
}

// toleration is a DeviceToleration.
type toleration struct {
	Key      string `json:"key"`
	Operator string `json:"operator"`
	Value    string `json:"value"`
	Effect   string `json:"effect"`
}

// tolerates reports whether the toleration matches a taint, by the rules of the API.
func (t *toleration) tolerates(taint *Taint) bool {
	if t.Effect != "" && t.Effect != taint.Effect || t.Key != "" && t.Key != taint.Key {
		return false
	}
	return t.Operator == "Exists" || t.Key != "" && t.Value == taint.Value
}

// allotted is a device of the node that a claim has.
type allotted struct {
	result
	device   *resource.Device
	resource string // its name
	preStart PreStart
	memory   uint64 // of the claim's share, in bytes, or 0 if no other claim can have the device
}

// pods returns the UIDs of the pods that the claim is reserved for.
func (c *claim) pods() []string {
	var uids []string
	for _, r := range c.Status.ReservedFor {
		if r.Resource == "pods" {
			uids = append(uids, r.UID)
		}
	}
	return uids
}

// has reports whether the claim still has the devices of a record.
func (c *claim) has(r *record) bool {
	if c.Metadata.UID != r.UID || c.Status.Allocation == nil {
		return false
	}
	for _, d := range r.Devices {
		if !slices.ContainsFunc(c.Status.Allocation.Devices.Results, func(one result) bool {
			return one.Pool == r.Pool && one.Device == d.Device
		}) {
			return false
		}
	}
	return true
}

// devices returns the devices of the node that a claim has by this driver, or why the claim must not be prepared. UID
// is that of the claim which the kubelet names: another claim may have the same name by now.
func (c *claim) devices(uid string, id Identity, s *node.State) ([]allotted, error) {
	switch {
	case c.Metadata.UID != uid:
		return nil, fmt.Errorf("it was deleted: the claim of this name has the UID %s now",
			wording.Shorten(c.Metadata.UID, maxName))
	case c.Status.Allocation == nil:
		return nil, fmt.Errorf("it is not allocated")
	}
	configs, err := c.configs(id.Driver)
	if err != nil {
		return nil, err
	}
	byName := offersByName(s)
	var list []allotted
	for _, r := range c.Status.Allocation.Devices.Results {
		if r.Driver != id.Driver {
			continue
		}
		if err := r.checkLengths(); err != nil {
			return nil, err
		}
		if r.Pool != id.Node {
			return nil, fmt.Errorf("its device %s belongs to the pool %s, not to this node", r.Device, r.Pool)
		}
		o, offered := byName[r.Device]
		if !offered {
			return nil, fmt.Errorf("the node has no device %s any more", r.Device)
		}
		if err := r.check(id.Driver, &o, s); err != nil {
			return nil, err
		}
		memory, err := r.shared()
		if err != nil {
			return nil, err
		}
		preStart, err := preStartOf(configs, r.Request)
		if err != nil {
			return nil, err
		}
		list = append(list, allotted{r, o.device, o.resource.Name, preStart, memory})
	}
	if len(list) == 0 {
		return nil, fmt.Errorf("it has no device of the driver %s", id.Driver)
	}
	return list, nil
}

// check returns why a claim must not have a device. It may have become unhealthy since the scheduler chose it. The
// ledger and the preparation of the device say what else is against it.
func (r *result) check(driver string, o *offer, s *node.State) error {
	if why := o.whyNot(); why != "" {
		return fmt.Errorf("%s is not offered by DRA any more: %s", o.label, why)
	}
	status, known := s.Health[o.device.UUID]
	if r.AdminAccess || !known || status.State == health.Healthy {
		return nil
	}
	for _, taint := range taintsOf(driver, o.device, s.Health) {
		tolerated := false
		for _, t := range r.Tolerations {
			tolerated = tolerated || t.tolerates(&taint)
		}
		if !tolerated {
			return fmt.Errorf("%s (%s) is not ready for a container: %s", o.label, o.device.UUID, status.Reason)
		}
	}
	return nil
}

func offersByName(s *node.State) map[string]offer {
	byName := map[string]offer{}
	for _, o := range offers(s) {
		byName[o.name] = o
	}
	return byName
}

// cdiNames returns the CDI names of a device, and those of what containers get with any device of its resource.
func (o *offer) cdiNames() []string {
	var names []string
	for _, g := range []*resource.Grant{o.resource.Grant, o.device.Grant} {
		if g != nil {
			names = append(names, g.CDIDevices...)
		}
	}
	return names
}

// isUID reports whether a text is the UID of an object, which is part of a file's name.
func isUID(text string) bool { return gpu.IsUUID(text) && text == strings.ToLower(text) }
