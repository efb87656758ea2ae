package kubelet

import "encoding/json"

// entryV1 is an Entry in the format of kubelets before 1.20.
type entryV1 struct {
	PodUID        string
	ContainerName string
	ResourceName  string
	DeviceIDs     []string
	AllocResp     []byte
}

type checkpointV1 struct {
	PodDeviceEntries  []entryV1
	RegisteredDevices map[string][]string
}

// parseV1 parses the format of kubelets before 1.20.
func parseV1(data []byte) (*Checkpoint, error) {
	f := struct {
		Data     checkpointV1
		Checksum uint64
	}{Data: checkpointV1{PodDeviceEntries: []entryV1{}, RegisteredDevices: map[string][]string{}}}
	if err := json.Unmarshal(data, &f); err != nil {
		return nil, err
	}
	if err := verify(f.Checksum, f.Data.dump()); err != nil {
		return nil, err
	}
	return f.Data.checkpoint(), nil
}

// parseBare parses the format of kubelets before 1.11, which has no checksum. It also reports whether the data has that
// format.
func parseBare(data []byte) (c *Checkpoint, ok bool, err error) {
	var keys map[string]json.RawMessage
	if err := json.Unmarshal(data, &keys); err != nil {
		return nil, false, nil //nolint:nilerr // it has another format, of which the caller reports the error
	}
	_, hasEntries := keys["PodDeviceEntries"]
	_, hasData := keys["Data"]
	_, hasChecksum := keys["Checksum"]
	if !hasEntries || hasData || hasChecksum {
		return nil, false, nil
	}
	f := checkpointV1{RegisteredDevices: map[string][]string{}}
	if err := json.Unmarshal(data, &f); err != nil {
		return nil, true, err
	}
	return f.checkpoint(), true, nil
}

func (c *checkpointV1) checkpoint() *Checkpoint {
	current := &Checkpoint{RegisteredDevices: c.RegisteredDevices}
	for _, e := range c.PodDeviceEntries {
		current.PodDeviceEntries = append(current.PodDeviceEntries, Entry{
			PodUID: e.PodUID, ContainerName: e.ContainerName, ResourceName: e.ResourceName,
			DeviceIDs: map[int64][]string{0: e.DeviceIDs}, AllocResp: e.AllocResp,
		})
	}
	return current
}

// dump returns the text that the checksum of the old format covers. Its types had the names that today's types have.
func (c *checkpointV1) dump() []byte {
	var p printer
	p.print("(checkpoint.checkpointData){PodDeviceEntries:([]checkpoint.PodDevicesEntry)")
	printList(&p, c.PodDeviceEntries, func(e entryV1) {
		p.entry(e.PodUID, e.ContainerName, e.ResourceName, "([]string)", e.AllocResp, func() { p.ids(e.DeviceIDs) })
	})
	p.registered(c.RegisteredDevices)
	return p.text
}
