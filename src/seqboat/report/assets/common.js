"use strict";
// Shared by charts and explorer. Text from data enters the page through text nodes and attributes only.

const numbers = JSON.parse(document.getElementById("numbers").textContent);

/** A new element; attributes that are null are left out, children may be elements or text. */
function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  return fill(element, attributes, children);
}

/** The same for SVG. */
function draw(tag, attributes, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value !== null && value !== undefined) element.setAttribute(name, String(value));
  }
  for (const child of children) element.append(child);
  return element;
}

/** A number in a unit, as it is usually written; null means that there is none. */
function spell(value, unit) {
  if (value === null || value === undefined || Number.isNaN(value)) return "-";
  if (unit === "percent") {
    const percent = 100 * value;
    return (percent > 0 && percent < 0.1 ? "< 0.1" : percent.toFixed(1)) + " %";
  }
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  if (size !== 0 && size < 1e-3) return value.toExponential(1);
  return String(Number(value.toPrecision(3)));
}

// Colors. Confidence runs from light to dark, as in the figures of the documentation; white is "not activated".
// Attention weights have another hue, so that the two cannot be mistaken for each other.
const CONFIDENCE = ["#d5eeb3", "#a9ddb7", "#73c9bd", "#45b4c2", "#2897bf", "#2073b2", "#234da0", "#21308b", "#0f2067"];
const WEIGHT = ["#fff3d6", "#fee391", "#fec44f", "#fe9929", "#ec7014", "#cc4c02", "#993404", "#662506"];

const hex = (color) => [1, 3, 5].map((i) => parseInt(color.slice(i, i + 2), 16));

/** Red, green and blue on a scale at a place from 0 to 1. */
function shade(scale, place) {
  const at = Math.min(Math.max(place, 0), 1) * (scale.length - 1);
  const below = Math.min(Math.floor(at), scale.length - 2);
  const [low, high] = [hex(scale[below]), hex(scale[below + 1])];
  return low.map((v, i) => Math.round(v + (high[i] - v) * (at - below)));
}

const css = (rgb) => `rgb(${rgb.join(",")})`;

/** Whether letters on a color should be light. */
const isDark = (rgb) => 0.299 * rgb[0] + 0.587 * rgb[1] + 0.114 * rgb[2] < 135;
