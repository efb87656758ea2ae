package devicemanager

import (
	"errors"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"gpu-cdi-plugin/manager/pod"
	"gpu-cdi-plugin/manager/quantity"
)

// TestManifestsHaveTheFieldsOfV1 sends manifests with each field name to each level that manager/pod reads: it must
// take the names that the type of Kubernetes has there, and no others.
func TestManifestsHaveTheFieldsOfV1(t *testing.T) {
	const head = "apiVersion: v1\nkind: Pod\n"
	levels := map[reflect.Type]func(field string) string{
		reflect.TypeFor[v1.Pod](): func(f string) string {
			return head + "metadata: {name: a}\nspec: {containers: [{name: c}]}\n" + f
		},
		reflect.TypeFor[metav1.ObjectMeta](): func(f string) string {
			return head + "metadata: {name: a, " + f + "}\nspec: {containers: [{name: c}]}\n"
		},
		reflect.TypeFor[v1.PodSpec](): func(f string) string {
			return head + "metadata: {name: a}\nspec: {containers: [{name: c}], " + f + "}\n"
		},
		reflect.TypeFor[v1.Container](): func(f string) string {
			return head + "metadata: {name: a}\nspec: {containers: [{name: c, " + f + "}]}\n"
		},
		reflect.TypeFor[v1.ResourceRequirements](): func(f string) string {
			return head + "metadata: {name: a}\nspec: {containers: [{name: c, resources: {" + f + "}}]}\n"
		},
	}
	var all []string
	for level := range levels {
		all = append(all, fieldsOf(level)...)
	}
	for level, manifest := range levels {
		known := fieldsOf(level)
		for _, field := range all {
			_, err := pod.Parse([]byte(manifest(field + ": ")))
			unknown := err != nil && strings.Contains(err.Error(), "unknown key")
			if unknown == slices.Contains(known, field) {
				t.Errorf("%s of %s: unknown is %t (%v)", field, level, unknown, err)
			}
		}
	}
}

// fieldsOf returns the names of a type's fields in JSON.
func fieldsOf(t reflect.Type) (names []string) {
	for f := range t.Fields() {
		name, option, _ := strings.Cut(f.Tag.Get("json"), ",")
		if option == "inline" || name == "" {
			names = append(names, fieldsOf(f.Type)...)
			continue
		}
		names = append(names, name)
	}
	return names
}

// TestQuantitiesAreThoseOfKubernetes compares what quantities are and how they are written: in texts with each meaning,
// and in random ones. Ours refuse some texts that have no meaning in a manifest: signs without digits, and numbers that
// an int64 does not have.
func TestQuantitiesAreThoseOfKubernetes(t *testing.T) {
	texts := []string{
		"0", "-0", "+7", "2", "2.0", "2.", ".5", "007", "500m", "1500m", "0.1", "1.5k", "1.5Gi", "1024Mi", "1023", "0.5Ki",
		"100u", "1n", "0.1n", "-0.1n", "1.0000000001", "-1Gi", "9223372036854775807", "7Ei", "0Gi", "12E", "1K", "1e", "x",
		"3000000", "1025", "999999m", "1.5", "0.0001Ki", "1000Ki", "1048577Ki", "1,5", "Gi", "",
	}
	random := rand.New(rand.NewPCG(1, 2))
	for range 100_000 {
		text := make([]byte, 1+random.IntN(12))
		for i := range text {
			const characters = "0123456789012345678901234567890123456789..+-eEnumkKMGTPi"
			text[i] = characters[random.IntN(len(characters))]
		}
		texts = append(texts, string(text))
	}
	for _, text := range texts {
		compareQuantity(t, text)
	}
}

func compareQuantity(t *testing.T, text string) {
	t.Helper()
	ours, err := quantity.Parse(text)
	if errors.Is(err, quantity.ErrInvalid) {
		return
	}
	theirs, theirErr := resource.ParseQuantity(text)
	if err := errors.Join(err, theirErr); err != nil {
		t.Errorf("%q is %s: %v", text, ours, err)
		return
	}
	if theirs.Format == resource.DecimalExponent { // which we write with suffixes
		theirs.Format = resource.DecimalSI
	}
	canonical, suffix := theirs.CanonicalizeBytes(make([]byte, 0, 64))
	if want := string(canonical) + string(suffix); ours.String() != want {
		t.Errorf("%q is %s, and in Kubernetes %s", text, ours, want)
	}
}
