package store_test

import (
	"errors"
	"math"
	"strings"
	"testing"

	"holdfast/store"
)

func TestContractNormalise(t *testing.T) {
	shares := func(values ...float64) []store.ClassShare {
		names := []string{"agent", "rlvr", "rlhf"}
		var classes []store.ClassShare
		for i, value := range values {
			classes = append(classes, store.ClassShare{Class: names[i], Share: value})
		}
		return classes
	}
	negative := -1
	for _, test := range []struct {
		name     string
		contract store.Contract
		path     string // of the refusal; empty means accepted
		says     string
	}{
		{"the paper's, off by 0.001", store.Contract{Classes: shares(0.486, 0.331, 0.182), MaxConcurrency: 1}, "", ""},
		{"one class", store.Contract{Classes: shares(1), MaxConcurrency: 1}, "", ""},
		{"a class of share zero", store.Contract{Classes: shares(1, 0), MaxConcurrency: 1}, "", ""},
		{"exactly 0.005 short", store.Contract{Classes: shares(0.5, 0.495), MaxConcurrency: 1}, "", ""},
		{"exactly 0.005 over", store.Contract{Classes: shares(0.5, 0.505), MaxConcurrency: 1}, "", ""},
		{"0.006 short", store.Contract{Classes: shares(0.5, 0.494), MaxConcurrency: 1}, "classes", "-0.006"},
		{"per cent instead of fractions", store.Contract{Classes: shares(48.6, 33.1, 18.2), MaxConcurrency: 1}, "classes[0].share", "48.6"},
		{"NaN", store.Contract{Classes: shares(0.5, math.NaN()), MaxConcurrency: 1}, "classes[1].share", "NaN"},
		{"infinite", store.Contract{Classes: shares(math.Inf(1)), MaxConcurrency: 1}, "classes[0].share", "Inf"},
		{"negative", store.Contract{Classes: shares(1.2, -0.2), MaxConcurrency: 1}, "classes[0].share", "1.2"},
		{"negative within the sum", store.Contract{Classes: shares(1, -0.002), MaxConcurrency: 1}, "classes[1].share", "-0.002"},
		{"no classes", store.Contract{MaxConcurrency: 1}, "classes", "holds 0"},
		{"a class twice", store.Contract{Classes: []store.ClassShare{{Class: "a", Share: 0.5}, {Class: "a", Share: 0.5}}, MaxConcurrency: 1}, "classes[1].class", "classes[0]"},
		{"an empty name", store.Contract{Classes: []store.ClassShare{{Share: 1}}, MaxConcurrency: 1}, "classes[0].class", ""},
		{"a name with a quote", store.Contract{Classes: []store.ClassShare{{Class: `a"b`, Share: 1}}, MaxConcurrency: 1}, "classes[0].class", ""},
		{"no concurrency", store.Contract{Classes: shares(1)}, "max_concurrency", "is 0"},
		{"absurd concurrency", store.Contract{Classes: shares(1), MaxConcurrency: 1 << 40}, "max_concurrency", ""},
		{"negative staleness", store.Contract{Classes: shares(1), MaxConcurrency: 1, StalenessBound: &negative}, "staleness_bound", "-1"},
		{"unknown group policy", store.Contract{Classes: shares(1), MaxConcurrency: 1, GroupPolicy: "shrug"}, "group_policy", "shrug"},
	} {
		t.Run(test.name, func(t *testing.T) {
			normalised, err := test.contract.Normalise()
			if test.path == "" {
				if err != nil {
					t.Fatal(err)
				}
				sum := 0.0
				for i, class := range normalised.Classes {
					sum += class.Share
					if ratio := class.Share / test.contract.Classes[i].Share; class.Share > 0 && math.Abs(ratio-normalised.Classes[0].Share/test.contract.Classes[0].Share) > 1e-12 {
						t.Errorf("normalising changed the proportions: %v of %v", normalised.Classes, test.contract.Classes)
					}
				}
				if math.Abs(sum-1) > 1e-12 {
					t.Errorf("shares sum to %v", sum)
				}
				return
			}
			var field *store.FieldError
			if !errors.As(err, &field) || field.Path != test.path || !strings.Contains(field.Problem, test.says) {
				t.Errorf("refused with %v, want path %s and %q", err, test.path, test.says)
			}
		})
	}
}
