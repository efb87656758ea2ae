package allocator

import (
	"maps"
	"reflect"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// Every weight of the configuration is validated, and reported under its key.
func TestAllWeightsAreValidated(t *testing.T) {
	w := DefaultWeights()
	want, got := map[string]int{}, maps.Collect(w.All())
	for field, value := range reflect.ValueOf(w).Fields() {
		want[field.Tag.Get("yaml")] = int(value.Int())
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("the weights by key (-fields +All):\n%s", diff)
	}
	for i := range reflect.TypeFor[Weights]().NumField() {
		key := reflect.TypeFor[Weights]().Field(i).Tag.Get("yaml")
		for _, weight := range []int64{-1, MaxWeight + 1} {
			wrong := DefaultWeights()
			reflect.ValueOf(&wrong).Elem().Field(i).SetInt(weight)
			if err := wrong.Validate(); err == nil || !strings.HasPrefix(err.Error(), key+": ") {
				t.Errorf("%s: %d: Validate returned %v", key, weight, err)
			}
		}
		for _, weight := range []int64{0, MaxWeight} {
			right := DefaultWeights()
			reflect.ValueOf(&right).Elem().Field(i).SetInt(weight)
			if err := right.Validate(); err != nil {
				t.Errorf("%s: %d: Validate returned %v", key, weight, err)
			}
		}
	}
}
