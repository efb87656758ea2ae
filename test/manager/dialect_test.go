package manager

import (
	"maps"
	"reflect"
	"slices"
	"testing"

	"gpu-cdi-plugin/manager/dialect"
	"gpu-cdi-plugin/test/manager/behaviour"
)

// elsewhere are the faults that no case shows, and why.
var elsewhere = map[string]string{
	"CrashesOnConcurrency": "no named dialect has it; manager/allocate_test.go shows it",
}

// The cases run with the kubelet's own code and with its dialect, so a fault that a case names is shown by both.
func TestEachFaultOfADialectIsShownByACase(t *testing.T) {
	shown := map[string]bool{}
	for _, c := range behaviour.Cases() {
		if c.Fault == "" {
			continue
		}
		shown[c.Fault] = true
		if c.Kubelet == "" || c.NoDialect != "" || c.Dialect != "" {
			t.Errorf("%q names the fault %s, and does not say that the kubelet and its dialect have it", c.Name, c.Fault)
		}
	}
	faults := map[string]bool{}
	for field := range reflect.TypeFor[dialect.Dialect]().Fields() {
		if field.Type.Kind() == reflect.Bool {
			faults[field.Name] = true
		}
	}
	for name := range faults {
		if shown[name] == (elsewhere[name] != "") {
			t.Errorf("%s is to be shown by a case, or listed as shown elsewhere, and not both", name)
		}
	}
	for _, name := range slices.Concat(slices.Collect(maps.Keys(shown)), slices.Collect(maps.Keys(elsewhere))) {
		if !faults[name] {
			t.Errorf("no fault is called %s", name)
		}
	}
	for _, c := range behaviour.Cases() {
		for _, name := range dialect.Names() {
			v := reflect.ValueOf(named(t, name)).FieldByName(c.Fault)
			if v.IsValid() && v.Bool() != c.In(release(name)) {
				t.Errorf("%s has %s: %t, and %q says otherwise", name, c.Fault, v.Bool(), c.Name)
			}
		}
	}
}
