// Package number finds numbers in what a model wrote and reads them exactly, as
// rationals.
//
// A number is, in this order of preference at each place of the text:
//
//   - \frac{a}{b}, \dfrac{a}{b} or \tfrac{a}{b}, with plain decimals a and b;
//   - a/b without white space, where neither is part of a longer chain such as a
//     date (2024/05/06) and b is not 0;
//   - a decimal: digits, optionally in groups of three parted by a comma, by {,}
//     or by \, ; optionally a point and digits; optionally e or E with a sign and
//     up to three digits. A point may come first (.5) where no digit is before it.
//
// One of - + and U+2212 directly before it is its sign, unless a digit, a letter
// or a closing bracket comes before that (10-5 holds 10 and 5). Digits directly
// after a letter or an underscore belong to a word (x2, H2O). What follows a
// number (a unit, %, a full stop) is ignored: 50% is 50. Mixed numbers are not
// read: 1 1/2 is 1 and then 1/2. Longer than MaxBytes is no number.
package number

import (
	"math/big"
	"strings"
	"unicode"
	"unicode/utf8"
)

// MaxBytes bounds one number, and with three digits of exponent the memory that
// its exact value takes.
const MaxBytes = 200

// Parse reads a text that is one number and nothing else but white space.
func Parse(text string) (*big.Rat, bool) {
	text = strings.TrimSpace(text)
	value, length := read(text, 0)
	if value == nil || length != len(text) {
		return nil, false
	}
	return value, true
}

// Last returns the last number of text. If text holds a complete \boxed{...},
// only the inside of the last one counts.
func Last(text string) (*big.Rat, bool) {
	if inside, ok := Boxed(text); ok {
		text = inside
	}
	var last *big.Rat
	for i := 0; i < len(text); {
		value, length := read(text, i)
		if value != nil {
			last = value
		}
		i += length
	}
	return last, last != nil
}

// Boxed returns the inside of the last \boxed{...} whose braces are balanced.
// Braces after a backslash do not count.
func Boxed(text string) (inside string, ok bool) {
	const opening = `\boxed{`
	for end := len(text); ; {
		begin := strings.LastIndex(text[:end], opening)
		if begin < 0 {
			return "", false
		}
		// Only up to the next box that was tried: what lies behind has been looked
		// at, so the time stays linear in the length of the text.
		inside := text[begin+len(opening):]
		if length := balanced(inside); length >= 0 {
			return inside[:length], true
		}
		// An unfinished box hides every complete one that begins before it only if
		// it stands inside; such a one is not complete either.
		end = begin
		text = text[:begin]
	}
}

// balanced returns the length of the text before the brace that closes one
// opened before it, or -1.
func balanced(text string) int {
	depth := 1
	for i := 0; i < len(text); i++ {
		switch text[i] {
		case '\\':
			i++
		case '{':
			depth++
		case '}':
			if depth--; depth == 0 {
				return i
			}
		}
	}
	return -1
}

// read looks at place i of text. It returns the number that begins there and its
// length, or nil and how far to go on.
func read(text string, i int) (value *big.Rat, length int) {
	start := i
	negative := false
	if sign := signAt(text, i); sign > 0 {
		negative = text[i] != '+'
		i += sign
	}
	if !mayBegin(text, start) {
		// The rest of a word's digits belongs to the word.
		return nil, max(1, digitsAt(text, start))
	}
	if value, length = fractionMacro(text, i); value == nil {
		value, length = fractionOrDecimal(text, i)
	}
	if value == nil {
		_, size := utf8.DecodeRuneInString(text[start:])
		return nil, max(size, length)
	}
	if length > MaxBytes {
		return nil, length
	}
	if negative {
		value.Neg(value)
	}
	return value, i - start + length
}

// signAt returns the length of a sign at i, or 0.
func signAt(text string, i int) int {
	length := 0
	switch {
	case strings.HasPrefix(text[i:], "-"), strings.HasPrefix(text[i:], "+"):
		length = 1
	case strings.HasPrefix(text[i:], "\u2212"):
		length = len("\u2212")
	default:
		return 0
	}
	before, _ := utf8.DecodeLastRuneInString(text[:i])
	if unicode.IsDigit(before) || unicode.IsLetter(before) || strings.ContainsRune(")]}", before) {
		return 0
	}
	return length
}

// mayBegin tells whether digits at i would not belong to a word.
func mayBegin(text string, i int) bool {
	if i == 0 || !isDigit(text, i) {
		return true
	}
	before, _ := utf8.DecodeLastRuneInString(text[:i])
	return !unicode.IsLetter(before) && before != '_'
}

func fractionMacro(text string, i int) (*big.Rat, int) {
	for _, macro := range []string{`\frac{`, `\dfrac{`, `\tfrac{`} {
		rest, ok := strings.CutPrefix(text[i:], macro)
		if !ok {
			continue
		}
		above, rest, ok := strings.Cut(rest, "}")
		if !ok || len(above) > MaxBytes || !strings.HasPrefix(rest, "{") {
			return nil, 0
		}
		below, rest, ok := strings.Cut(rest[1:], "}")
		if !ok || len(below) > MaxBytes {
			return nil, 0
		}
		a, ok := plain(above)
		b, okBelow := plain(below)
		if !ok || !okBelow || b.Sign() == 0 {
			return nil, 0
		}
		return a.Quo(a, b), len(text) - i - len(rest)
	}
	return nil, 0
}

// plain reads a signed decimal that is the whole text.
func plain(text string) (*big.Rat, bool) {
	text = strings.TrimSpace(text)
	if text == "" {
		return nil, false
	}
	sign := signAt(text, 0)
	value, length := decimal(text, sign)
	if value == nil || sign+length != len(text) {
		return nil, false
	}
	if sign > 0 && text[0] != '+' {
		value.Neg(value)
	}
	return value, true
}

func fractionOrDecimal(text string, i int) (*big.Rat, int) {
	a, length := decimal(text, i)
	if a == nil || i+length >= len(text) || text[i+length] != '/' {
		return a, length
	}
	if i > 0 && text[i-1] == '/' || !isDigit(text, i+length+1) {
		return a, length
	}
	b, lengthBelow := decimal(text, i+length+1)
	end := i + length + 1 + lengthBelow
	if b == nil || b.Sign() == 0 || end < len(text) && text[end] == '/' {
		return a, length
	}
	return a.Quo(a, b), end - i
}

// decimal reads an unsigned decimal at i. The length counts also when the value
// is nil because it is too long.
func decimal(text string, i int) (*big.Rat, int) {
	start := i
	var digits strings.Builder
	whole := digitsAt(text, i)
	digits.WriteString(text[i : i+whole])
	i += whole
	if whole >= 1 && whole <= 3 {
		for {
			separator := separatorAt(text, i)
			if separator == 0 || digitsAt(text, i+separator) != 3 {
				break
			}
			digits.WriteString(text[i+separator : i+separator+3])
			i += separator + 3
		}
	}
	if i < len(text) && text[i] == '.' && isDigit(text, i+1) && (whole > 0 || start == 0 || !isDigit(text, start-1)) {
		fraction := digitsAt(text, i+1)
		digits.WriteString(text[i : i+1+fraction])
		i += 1 + fraction
	}
	if digits.Len() == 0 {
		return nil, 0
	}
	if exponent := exponentAt(text, i); exponent > 0 {
		digits.WriteString(text[i : i+exponent])
		i += exponent
	}
	if i-start > MaxBytes {
		return nil, i - start
	}
	value, ok := new(big.Rat).SetString(digits.String())
	if !ok {
		return nil, i - start
	}
	return value, i - start
}

func separatorAt(text string, i int) int {
	for _, separator := range []string{",", "{,}", `\,`} {
		if i <= len(text) && strings.HasPrefix(text[i:], separator) {
			return len(separator)
		}
	}
	return 0
}

// exponentAt returns the length of an exponent at i, or 0. Digits or letters
// behind it make it something else.
func exponentAt(text string, i int) int {
	if i >= len(text) || (text[i] != 'e' && text[i] != 'E') {
		return 0
	}
	j := i + 1
	if j < len(text) && (text[j] == '+' || text[j] == '-') {
		j++
	}
	digits := digitsAt(text, j)
	if digits < 1 || digits > 3 {
		return 0
	}
	j += digits
	if after, _ := utf8.DecodeRuneInString(text[j:]); unicode.IsLetter(after) {
		return 0
	}
	return j - i
}

func isDigit(text string, i int) bool {
	return i >= 0 && i < len(text) && text[i] >= '0' && text[i] <= '9'
}

func digitsAt(text string, i int) int {
	n := 0
	for isDigit(text, i+n) {
		n++
	}
	return n
}
