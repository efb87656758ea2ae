package allocator

import (
	"maps"
	"reflect"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// The configuration validates what All yields.
func TestAllYieldsEveryWeight(t *testing.T) {
	w := DefaultWeights()
	want, got := map[string]int{}, maps.Collect(w.All())
	for field, value := range reflect.ValueOf(w).Fields() {
		want[field.Tag.Get("yaml")] = int(value.Int())
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("the weights by key (-fields +All):\n%s", diff)
	}
}
