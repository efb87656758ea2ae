package manager_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"gpu-cdi-plugin/manager"
	"gpu-cdi-plugin/manager/model"
)

func TestImportsAreCheckedAsAWhole(t *testing.T) {
	t.Parallel()
	placed := func(uid, id string) model.Placement {
		return model.Placement{
			Pod:         model.Pod{UID: uid, Containers: []model.Container{{Name: "main", Limits: map[string]int{"r": 1}}}},
			Allocations: []model.Allocation{{Container: "main", Resource: "r", IDs: []string{id}, Response: []byte{}}},
		}
	}
	var many []string
	for i := range 257 {
		many = append(many, fmt.Sprint("example.com/", i))
	}
	before := []model.Placement{placed("a", "0")}
	before[0].Pod.Name, before[0].Allocations[0].Response = "name", nil // it was admitted since
	for name, test := range map[string]struct {
		pods      []model.Placement
		resources []string
		want      []string // UIDs
		err       error
		text      string
	}{
		"all pods": {pods: []model.Placement{placed("b", "1"), placed("c", "2")}, want: []string{"b", "c"}},
		"the pods that an import before has not added": {
			pods: []model.Placement{placed("a", "0"), placed("b", "1")}, want: []string{"b"},
		},
		"a pod that has another device": {
			pods: []model.Placement{placed("b", "1"), placed("a", "2")}, err: manager.ErrPlaced,
			text: "pod a is already placed",
		},
		"a device of another pod": {
			pods: []model.Placement{placed("b", "0")}, err: manager.ErrPlaced,
			text: "r=0 of pod b is already placed: pod a has it",
		},
		"a pod without a UID": {
			pods: []model.Placement{placed("b", "1"), placed("", "2")}, err: manager.ErrInvalid, text: `pod ""`,
		},
		"a pod with a long UID": {
			pods: []model.Placement{placed(strings.Repeat("u", 254), "2")}, err: manager.ErrInvalid, text: "253 characters",
		},
		"too many resources": {resources: many, text: "there are 257 resources, more than the maximum of 256"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			added, err := manager.Importable(before, test.pods, test.resources)
			if test.text != "" {
				if err == nil || !strings.Contains(err.Error(), test.text) || test.err != nil && !errors.Is(err, test.err) {
					t.Fatalf("got the error %v, want %q", err, test.text)
				}
				return
			}
			var got []string
			for _, p := range added {
				got = append(got, p.Pod.UID)
			}
			if err != nil || !slices.Equal(got, test.want) {
				t.Errorf("got %v and %v, want %v", got, err, test.want)
			}
		})
	}
}
