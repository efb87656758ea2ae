package kubelet

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
)

// ClaimsName is the name of the file in the kubelet's root directory in which it records the ResourceClaims of pods.
// Its mode is 0600.
const ClaimsName = "dra_manager_state"

// Claim is a ResourceClaim of a pod that the kubelet has admitted, as in the file of ClaimsName.
type Claim struct {
	UID, Namespace, Name string
	// Pods are the UIDs of the pods that have the claim, sorted.
	Pods []string
	// Devices are the prepared devices by DRA driver. The kubelet records them when all drivers of all claims of a pod
	// have answered; until then a driver may have prepared devices that are not here.
	Devices map[string][]ClaimDevice
}

// ClaimDevice is a prepared device of a claim.
type ClaimDevice struct{ Pool, Name string }

// claimsFile is the content of the file, as Kubernetes 1.32 and later write it. The data is JSON in a string.
type claimsFile struct {
	Data *string
	// Entries is what kubelets before 1.32 have instead, which know no version of the API that drivers serve today.
	Entries json.RawMessage `json:"entries"`
}

type claimsData struct {
	Kind               string `json:"kind"`
	ClaimInfoStateList []struct {
		ClaimUID, ClaimName, Namespace string
		PodUIDs                        map[string]struct{}
		DriverState                    map[string]struct {
			Devices []struct{ PoolName, DeviceName string }
		}
	}
}

const claimsKind = "DRACheckpoint"

// ParseClaims parses the file of ClaimsName. It ignores the checksum: the kubelet does not start with a wrong one.
func ParseClaims(data []byte) ([]Claim, error) {
	list, err := parseClaims(data)
	if err != nil {
		return nil, fmt.Errorf("parse the kubelet's record of ResourceClaims: %w", err)
	}
	return list, nil
}

func parseClaims(data []byte) ([]Claim, error) {
	if err := checkSize(data); err != nil {
		return nil, err
	}
	var file claimsFile
	if err := json.Unmarshal(data, &file); err != nil {
		return nil, err
	}
	if file.Data == nil {
		if file.Entries != nil {
			return []Claim{}, nil
		}
		return nil, errors.New("it has no Data")
	}
	var content claimsData
	if err := json.Unmarshal([]byte(*file.Data), &content); err != nil {
		return nil, err
	}
	if content.Kind != claimsKind {
		return nil, fmt.Errorf("its kind is %q, not %s", content.Kind, claimsKind)
	}
	list := make([]Claim, 0, len(content.ClaimInfoStateList))
	seen := map[string]bool{}
	for _, c := range content.ClaimInfoStateList {
		if seen[c.ClaimUID] {
			return nil, fmt.Errorf("it has the claim with the UID %q twice", c.ClaimUID)
		}
		seen[c.ClaimUID] = true
		one := Claim{
			UID: c.ClaimUID, Namespace: c.Namespace, Name: c.ClaimName, Pods: slices.Sorted(maps.Keys(c.PodUIDs)),
			Devices: map[string][]ClaimDevice{},
		}
		for driver, state := range c.DriverState {
			for _, d := range state.Devices {
				one.Devices[driver] = append(one.Devices[driver], ClaimDevice{Pool: d.PoolName, Name: d.DeviceName})
			}
		}
		list = append(list, one)
	}
	return list, nil
}
