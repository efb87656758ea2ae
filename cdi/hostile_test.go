package cdi

import (
	"os"
	"path/filepath"
	"testing"

	"gpu-cdi-plugin/test/lib/hostileyaml"
)

func TestHostileSpecs(t *testing.T) {
	path := filepath.Join(t.TempDir(), "spec.yaml")
	hostileyaml.Check(t, "kind", "devices", func(data []byte) error {
		if err := os.WriteFile(path, data, 0o644); err != nil {
			t.Fatal(err)
		}
		_, err := ReadFile(path)
		return err
	})
}
