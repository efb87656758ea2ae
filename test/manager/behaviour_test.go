package manager

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/test/lib/testenv"
	"gpu-cdi-plugin/test/manager/behaviour"
)

func TestTheManagerBehavesAsTheCasesSay(t *testing.T) {
	t.Parallel()
	behaviour.Test(t, behaviour.Subject{Name: "ours", New: New})
}

var update = flag.Bool("update", false, "write docs/manager-differences.md")

// TestDifferencesAreDocumented keeps the table of the differences equal to the cases.
func TestDifferencesAreDocumented(t *testing.T) {
	const path = "../../docs/manager-differences.md"
	want := differences()
	if *update {
		if err := os.WriteFile(path, []byte(want), 0o644); err != nil { //nolint:gosec // a document
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(path)
	testenv.Must(t, err)
	if diff := cmp.Diff(want, string(got)); diff != "" {
		t.Errorf("%s (-want +got; -update writes it):\n%s", path, diff)
	}
}

func differences() string {
	var b strings.Builder
	b.WriteString(`# Where the device manager differs from the kubelet

Each line is a case of the suite ` + "`test/manager/behaviour`" + `, which runs with this manager and with the device
manager of Kubernetes 1.37.2. Cases in which the kubelet's crashes or waits for ever run only with this manager. In all
other cases of the suite both do the same. B with a number is a known fault of the kubelet.
Texts of errors are the kubelet's, but quote a plugin's error without the code of gRPC before it.

| | the kubelet | this manager |
|---|---|---|
`)
	for _, c := range behaviour.Cases() {
		if c.Kubelet == "" {
			continue
		}
		name, fault := c.Name, strings.FieldsFunc(c.Mirrors, func(r rune) bool { return r == ';' })[0]
		if strings.HasPrefix(fault, "B") {
			name += " (" + fault + ")"
		}
		fmt.Fprintf(&b, "| %s | %s | %s |\n", name, c.Kubelet, c.Here)
	}
	return b.String()
}
