package yamlfile

import (
	"testing"

	"gpu-cdi-plugin/test/lib/hostileyaml"
)

func TestHostileDocuments(t *testing.T) {
	hostileyaml.Check(t, "name", "rules", func(data []byte) error {
		_, err := Decode(data, &file{}, nil)
		return err
	})
}
