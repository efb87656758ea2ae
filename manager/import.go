package manager

import (
	"bytes"
	"fmt"
	"maps"
	"slices"

	"gpu-cdi-plugin/manager/endpoint"
	"gpu-cdi-plugin/manager/model"
)

// Importable returns those imported placements that an earlier import has not added. `placed` are the placements in
// the state, which no running manager may use, and `resources` the names of all resources after the import. The error
// wraps ErrInvalid if a manager would refuse a pod, and ErrPlaced if a pod or one of its devices is already placed.
func Importable(placed, imported []model.Placement, resources []string) ([]model.Placement, error) {
	if len(resources) > endpoint.MaxResources {
		return nil, fmt.Errorf("there are %d resources, more than the maximum of %d", len(resources), endpoint.MaxResources)
	}
	for _, p := range imported {
		if err := Validate(p.Pod); err != nil {
			return nil, fmt.Errorf("pod %q: %w", p.Pod.UID, err)
		}
	}
	added := slices.DeleteFunc(slices.Clone(imported), func(p model.Placement) bool {
		return slices.ContainsFunc(placed, func(have model.Placement) bool { return samePlacement(have, p) })
	})
	return added, checkUnplaced(placed, added)
}

// samePlacement reports whether two placements have the same devices in the containers that have not ended.
func samePlacement(a, b model.Placement) bool {
	return a.Pod.UID == b.Pod.UID && len(a.Ended) == len(b.Ended) &&
		slices.EqualFunc(a.Allocations, b.Allocations, func(a, b model.Allocation) bool {
			return a.Container == b.Container && a.Resource == b.Resource && slices.Equal(a.IDs, b.IDs) &&
				bytes.Equal(a.Response, b.Response) && maps.EqualFunc(a.NUMA, b.NUMA, slices.Equal)
		})
}

// checkUnplaced returns an error if one of the imported pods, or one of their devices, is already placed.
func checkUnplaced(placed, imported []model.Placement) error {
	type device struct{ resource, id string }
	pods, holders := map[string]bool{}, map[device]string{}
	hold := func(p model.Placement) error {
		for _, allocation := range p.Held() {
			for _, id := range allocation.IDs {
				d := device{allocation.Resource, id}
				if holder, ok := holders[d]; ok && holder != p.Pod.UID {
					return fmt.Errorf("%s=%s of pod %s %w: pod %s has it", d.resource, id, p.Pod.UID, ErrPlaced, holder)
				}
				holders[d] = p.Pod.UID
			}
		}
		return nil
	}
	for _, p := range placed {
		pods[p.Pod.UID] = true
		if err := hold(p); err != nil {
			return err
		}
	}
	for _, p := range imported {
		if pods[p.Pod.UID] {
			return fmt.Errorf("pod %s %w", p.Pod.UID, ErrPlaced)
		}
		if err := hold(p); err != nil {
			return err
		}
	}
	return nil
}
