package agent

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"

	"gpu-cdi-plugin/agent/config"
	"gpu-cdi-plugin/agent/ledger"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/wording"
)

// Claims is who holds which devices, the answer to control.Claims.
type Claims struct {
	Holders []Holding `json:"holders"`
	// Unknown says why it is unknown which containers hold devices, or is empty. Holders is then as of the last time that
	// it was known; the claims are always known.
	Unknown string `json:"unknown,omitempty"`
}

// Holding is a device that a container or a claim holds.
type Holding struct {
	Index string      `json:"index,omitempty"` // "3", "3:0" for a MIG device, empty if the driver does not report it
	Door  config.Door `json:"door"`
	ledger.Holding
}

// claims returns Claims as JSON, in the order of the devices.
func (a *administrator) claims(ctx context.Context) (string, error) {
	var answer Claims
	if _, err := a.ledger.Read(ctx); err != nil {
		answer.Unknown = wording.OneLine(err)
	}
	answer.Holders = inOrder(a.node.State().Snapshot, a.ledger.Holdings())
	data, err := json.Marshal(answer)
	return string(data), err
}

// inOrder sorts holdings by the index of their device. Devices that are not in the snapshot are the last.
func inOrder(s *gpu.Snapshot, held []ledger.Holding) []Holding {
	index, place := map[string]string{}, map[string]int{}
	add := func(uuid, name string) { index[uuid], place[uuid] = name, len(place)+1 }
	if s != nil {
		for i := range s.Devices {
			d := &s.Devices[i]
			add(d.UUID, fmt.Sprint(d.Index))
			for j := range d.MIG {
				add(d.MIG[j].UUID, fmt.Sprintf("%d:%d", d.Index, d.MIG[j].Index))
			}
		}
	}
	list := []Holding{}
	for _, h := range held {
		door := config.PluginDoor
		if h.Claim != "" {
			door = config.DRADoor
		}
		list = append(list, Holding{index[h.UUID], door, h})
	}
	last := len(place) + 1
	slices.SortStableFunc(list, func(a, b Holding) int {
		return cmp.Compare(cmp.Or(place[a.UUID], last), cmp.Or(place[b.UUID], last))
	})
	return list
}
